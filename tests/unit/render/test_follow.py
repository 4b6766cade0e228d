"""`place.target = "follow"`: one trainer, one publisher, servers of what it publishes, a broker that keeps records."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import time
import tomllib
from dataclasses import replace
from urllib.request import urlopen

import kubernetes_validate
import nats
import pytest
import yaml
from integration.faults.zygote import free_port
from limits import HANG_S

from embark.catalog import load_catalog
from embark.errors import SpecError
from embark.lint.check import lint_texts
from embark.lint.rendered import refuse_faults
from embark.rehearse.processes import find_nats_server
from embark.render.job import make_job
from embark.render.render import render
from embark.spec import load_spec, parse_spec

VERSION = "1.36"
NATS = ("stream.source=nats", "stream.topics=['events.shown']")
KAFKA = ("stream.source=kafka", "stream.topics=['shown']", "stream.servers=['broker:9092']", "stream.secret=broker")
SETS = ("name=clicks", "place.target=follow", "place.machine=g5.xlarge", "store.root=s3://bucket/runs",
        "publish.to=s3://bucket/models/", "place.cluster=existing", "train.decay=none")


def job_of(*sets: str):
    return make_job(load_spec("quickstart", [*SETS, *sets]), load_catalog())


def files_of(*sets: str) -> dict[str, str]:
    files = render(job_of(*sets))
    refuse_faults(files)
    return {file.path: file.text for file in files}


def answers(url: str) -> bool:
    try:
        return urlopen(url, timeout=10).status == 200
    except OSError:
        return False


def objects(files: dict[str, str], path: str) -> dict[tuple[str, str], dict]:
    return {(one["kind"], one["metadata"]["name"]): one for one in yaml.safe_load_all(files[path])}


@pytest.mark.parametrize("sets", [NATS, KAFKA, ("stream.source=files", "stream.path=s3://bucket/events")], ids=str)
def test_the_api_server_s_schemas_take_every_object(sets):
    files = files_of(*sets)
    assert ("nats.yaml" in files, "kafka_topics.yaml" in files) == (sets == NATS, sets == KAFKA)
    for path in ("follow.yaml", "serve.yaml", *(["nats.yaml"] if sets == NATS else [])):
        for document in objects(files, path).values():
            kubernetes_validate.validate(document, VERSION, strict=True)


def test_trainer_publisher_servers_and_broker_fit_each_other():
    files = files_of(*NATS, "stream.retention_hours=30")
    follow, serve = objects(files, "follow.yaml"), objects(files, "serve.yaml")
    trainer, publisher = follow["StatefulSet", "clicks"], follow["Deployment", "clicks-publish"]
    assert trainer["spec"]["replicas"] == publisher["spec"]["replicas"] == 1
    assert publisher["spec"]["strategy"] == {"type": "Recreate"}
    container, = trainer["spec"]["template"]["spec"]["containers"]
    assert container["command"] == ["embark", "follow", "/etc/embark/spec.toml", "--make-streams"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == 1
    spec = parse_spec(follow["ConfigMap", "clicks-spec"]["data"]["spec.toml"])
    assert spec.stream.retention_hours == 30
    assert spec.stream.servers == ("nats://clicks-nats:4222",)
    broker = objects(files, "nats.yaml")
    assert broker["Service", "clicks-nats"]["spec"]["ports"][0]["port"] == 4222
    assert "--port=4222" in broker["StatefulSet", "clicks-nats"]["spec"]["template"]["spec"]["containers"][0]["command"]
    assert publisher["spec"]["template"]["spec"]["containers"][0]["command"] == [
        "embark", "publish", "s3://bucket/runs/clicks", "--watch"]
    server, = serve["Deployment", "clicks-serve"]["spec"]["template"]["spec"]["containers"]
    assert server["command"][:3] == ["embark", "serve", "s3://bucket/models"]
    for selected, others in ((trainer, publisher), (publisher, trainer), (serve["Service", "clicks-serve"], trainer)):
        selector = selected["spec"]["selector"].get("matchLabels") or selected["spec"]["selector"]
        assert not selector.items() <= others["spec"]["template"]["metadata"]["labels"].items()
    assert {one["spec"]["template"]["spec"]["serviceAccountName"] for one in (trainer, publisher)} == {"embark"}
    assert serve["Deployment", "clicks-serve"]["spec"]["template"]["spec"]["serviceAccountName"] == "embark-serve"
    assert "serve" in files["Dockerfile"]
    assert "nats" in files["Dockerfile"]


def test_the_broker_asks_for_the_token_that_the_trainer_gives():
    files = files_of(*NATS)
    broker = objects(files, "nats.yaml")
    container, = broker["StatefulSet", "clicks-nats"]["spec"]["template"]["spec"]["containers"]
    assert container["env"] == [{"name": "NATS_TOKEN", "valueFrom": {
        "secretKeyRef": {"name": "clicks-nats", "key": "token"}}}]
    pod = objects(files, "follow.yaml")["StatefulSet", "clicks"]["spec"]["template"]["spec"]
    assert {"name": "stream", "secret": {"secretName": "clicks-nats"}} in pod["volumes"]
    policy = broker["NetworkPolicy", "clicks-nats"]["spec"]
    assert policy["ingress"][0]["ports"] == [{"protocol": "TCP", "port": 4222}]


def test_nats_takes_its_configuration_and_refuses_who_has_no_token(tmp_path):
    broker = objects(files_of(*NATS, "stream.broker_gib=10"), "nats.yaml")
    container, = broker["StatefulSet", "clicks-nats"]["spec"]["template"]["spec"]["containers"]
    config = tmp_path / "nats.conf"
    config.write_text(broker["ConfigMap", "clicks-nats"]["data"]["nats.conf"])
    ports = {"4222": str(free_port()), "8222": str(free_port())}
    words = [word.replace("/etc/nats", str(tmp_path)).replace("/data", str(tmp_path / "data"))
             for word in container["command"]]
    for old, new in ports.items():
        words = [word.replace(f"={old}", f"={new}") for word in words]
    process = subprocess.Popen([find_nats_server(), *words[1:]], env={"NATS_TOKEN": "2e5-secret"},
                               stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        probe = container["livenessProbe"]["httpGet"]["path"]
        until = time.monotonic() + HANG_S
        while not answers(f"http://127.0.0.1:{ports['8222']}{probe}"):
            assert process.poll() is None
            assert time.monotonic() < until
            time.sleep(0.02)
        limits = json.loads(urlopen(f"http://127.0.0.1:{ports['8222']}/jsz", timeout=10).read())["config"]
        assert limits["max_storage"] == 9 * 2**30

        async def connect(**options):
            client = await nats.connect(f"nats://127.0.0.1:{ports['4222']}", allow_reconnect=False,
                                        max_reconnect_attempts=0, connect_timeout=10, **options)
            await client.close()

        asyncio.run(connect(**tomllib.loads('token = "2e5-secret"')))
        with pytest.raises(nats.errors.Error):
            asyncio.run(connect())
    finally:
        process.terminate()
        process.wait(30)


@pytest.mark.parametrize(("sets", "name"), [
    ((), None), (("place.storage_class=fast",), "fast"), (("place.cluster=create",), "embark-gp3")])
def test_the_broker_s_disk_has_a_class_where_it_is_known(sets, name):
    files = files_of(*NATS, *sets)
    broker = objects(files, "nats.yaml")["StatefulSet", "clicks-nats"]
    assert broker["spec"]["volumeClaimTemplates"][0]["spec"].get("storageClassName") == name
    if name == "embark-gp3":
        made = objects(files, "eks_objects.yaml")["StorageClass", name]
        assert made["provisioner"] == "ebs.csi.aws.com"
        assert {"name": "aws-ebs-csi-driver"} in yaml.safe_load(files["eks_cluster.yaml"])["addons"]
        lines = files["eks_cluster.sh"].splitlines()
        claims = next(n for n, line in enumerate(lines) if "kubectl delete pvc" in line)
        assert claims < next(n for n, line in enumerate(lines) if "eksctl delete cluster" in line)


def test_a_process_that_hangs_is_restarted_and_one_that_works_is_not(tmp_path):
    follow = objects(files_of(*NATS), "follow.yaml")
    beats = tmp_path / "heartbeat"
    for owner in (follow["StatefulSet", "clicks"], follow["Deployment", "clicks-publish"]):
        container, = owner["spec"]["template"]["spec"]["containers"]
        assert {"name": "EMBARK_HEARTBEAT", "value": "/scratch/heartbeat"} in container["env"]
        command = container["livenessProbe"]["exec"]["command"]

        def is_alive(command=command):
            done = subprocess.run(command, env={**os.environ, "EMBARK_HEARTBEAT": str(beats)}, check=False)
            return done.returncode == 0

        beats.unlink(missing_ok=True)
        assert is_alive()  # it has not begun
        beats.touch()
        assert is_alive()
        os.utime(beats, (0, 0))
        assert not is_alive()


def test_a_changed_spec_replaces_trainer_and_publisher():
    before, after = (objects(files_of(*NATS, *sets), "follow.yaml") for sets in ((), ("train.learning_rate=0.5",)))
    for key in (("StatefulSet", "clicks"), ("Deployment", "clicks-publish")):
        first, second = (one[key]["spec"]["template"]["metadata"]["annotations"] for one in (before, after))
        assert first["embark/config-checksum"] != second["embark/config-checksum"]


def test_kafka_s_topics_keep_records_and_its_secret_reaches_the_trainer():
    files = files_of(*KAFKA, "stream.retention_hours=24")
    topic = objects(files, "kafka_topics.yaml")["KafkaTopic", "shown"]
    assert topic["spec"]["config"]["retention.ms"] == 24 * 3_600_000
    pod = objects(files, "follow.yaml")["StatefulSet", "clicks"]["spec"]["template"]["spec"]
    assert {"name": "EMBARK_STREAM_OPTIONS", "value": "/etc/embark-stream/options.toml"} in pod["containers"][0]["env"]
    assert {"name": "stream", "secret": {"secretName": "broker"}} in pod["volumes"]


def test_the_cluster_s_scripts_may_write_where_versions_are_published():
    files = files_of(*NATS, "place.cluster=create", "publish.to=s3://others/models")
    assert "arn:aws:s3:::others/models/*" in files["eks_cluster.yaml"]
    assert "--bucket others" in files["storage.sh"]


def test_servers_without_own_machines_are_said_before_eks_is_paid():
    script = files_of(*NATS, "place.cluster=create")["eks_cluster.sh"]
    warning = script.index("the second server may find no room. serve.machine gives")
    assert warning < script.index("eksctl create cluster")
    assert "find no room" not in files_of(*NATS, "place.cluster=create", "serve.machine=c7i.xlarge")["eks_cluster.sh"]


@pytest.mark.parametrize(("sets", "field"), [
    (("stream.source=", "stream.topics=[]"), "stream.source"), (("place.nodes=2",), "place.nodes"),
    (("store.root=runs",), "store.root"), (("publish.to=models",), "publish.to"),
    (("serve.artifact=s3://bucket/others",), "serve.artifact"),
    (("place.identity=arn:aws:iam::123456789012:role/train",), "serve.identity"),
    (("publish.tables=int8",), "serve.tables"),
    (("store.checkpoint_every=0",), "store.checkpoint_every"),
    (("stream.retention_hours=1",), "stream.retention_hours"),
    (("stream.source=files", "stream.topics=[]", "stream.path=events"), "stream.path")], ids=str)
def test_what_cannot_be_deployed_is_refused(sets, field):
    with pytest.raises(SpecError) as caught:
        job_of(*NATS, *sets)
    assert field in [mistake.field for mistake in caught.value.mistakes]


def test_mistakes_made_by_hand_are_found():
    files = {path: text for path, text in files_of(*NATS).items() if path.endswith(".yaml")}
    edits = {"EMB951": ("follow.yaml", "replicas: 1\n  serviceName", "replicas: 2\n  serviceName"),
             "EMB953": ("serve.yaml", "- s3://bucket/models\n", "- s3://bucket/runs/clicks/export\n")}
    assert [one for one in lint_texts(files) if one.level == "error"] == []
    for code, (path, old, new) in edits.items():
        assert old in files[path]
        found = lint_texts({**files, path: files[path].replace(old, new)})
        assert [one.code for one in found if one.level == "error"] == [code]


def test_folders_of_servers_and_followers_below_a_job_s_are_its_neighbours():
    """A guide renders them there. Each has an image and a place of versions of its own."""
    folders = {"": ("place.target=job", "name=films"), "serve/": ("place.target=serve", "name=films"), "follow/": NATS}
    files = [replace(file, path=folder + file.path)
             for folder, sets in folders.items() for file in render(job_of(*sets))]
    refuse_faults(files)
    texts = {file.path: file.text for file in files if file.path.endswith((".yaml", "Dockerfile"))}
    texts["serve/Dockerfile"] = texts["serve/Dockerfile"].replace("[cloud,serve]", "[cloud]")
    assert {(one.code, one.path) for one in lint_texts(texts) if one.level == "error"} == {
        ("EMB908", "serve/Dockerfile")}
