"""`place.target = "follow"`: one trainer, one publisher, servers of what it publishes, a broker that keeps records."""

from __future__ import annotations

import kubernetes_validate
import pytest
import yaml

from embark.catalog import load_catalog
from embark.errors import SpecError
from embark.lint.check import lint_texts
from embark.lint.rendered import refuse_faults
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
    assert "serve" in files["Dockerfile"]
    assert "nats" in files["Dockerfile"]


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


@pytest.mark.parametrize(("sets", "field"), [
    (("stream.source=", "stream.topics=[]"), "stream.source"), (("place.nodes=2",), "place.nodes"),
    (("store.root=runs",), "store.root"), (("publish.to=models",), "publish.to"),
    (("serve.artifact=s3://bucket/others",), "serve.artifact"), (("publish.tables=int8",), "serve.tables"),
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
