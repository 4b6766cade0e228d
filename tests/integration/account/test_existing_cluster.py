"""A cluster that someone else made: `embark doctor --cloud` names what it lacks, and a run trains in it."""

from __future__ import annotations

import copy
import importlib.util
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from account_faults import ask_for, pending
from integration.account.existing_cluster import (
    GPUS,
    IDENTITY,
    OTHERS,
    READER,
    AccountShell,
    existing_cluster,
    give,
    ok,
)

from cloudsim.session import AccountSession
from embark.cli.console import Console
from embark.cli.doctor import _show
from embark.doctor.cluster import check_cluster
from embark.doctor.host import Check
from embark.errors import UserError
from embark.kubernetes.contract import ITEMS
from embark.launch.backend import LaunchRequest
from embark.launch.backends.kubernetes.backend import Kubernetes
from embark.spec import RunSpec, load_spec

ROOT = Path(__file__).parents[3]
GUIDE = ROOT / "docs" / "guides" / "existing-cluster.md"
BLOCK = re.compile(r"^```\w+ (run|file=(\S+))\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SETTINGS = [
    "name=ads", "train.batch_size=16384", "place.cluster=existing", "place.nodes=2", "place.namespace=ads",
    "place.service_account=trainer", "place.image=ghcr.io/team/embark:1", "place.pull_secret=ghcr", "place.queue=ads",
    'place.node_selector=["gpu.nvidia.com/class=H100"]', 'place.tolerations=["team=ads:NoSchedule"]',
    "store.root=s3://ads/runs", "place.cloud=aws", f"place.identity={IDENTITY}", "place.claim=shared",
    'place.resources=["rdma/ib=8", "cpu=96", "memory=900Gi"]', "place.machine=8xH100",
]
STREAM = ["place.target=follow", "place.nodes=1", "stream.source=nats", 'stream.topics=["shown"]', "train.decay=none",
          "publish.to=s3://ads/models", "place.queue=", "place.claim=", "train.num_steps=0",
          f"serve.identity={READER}"]
"""A trainer that follows a stream, whose broker has a volume."""


def spec_of(*settings: str) -> RunSpec:
    return load_spec("quickstart", [*SETTINGS, *settings])


def drop(kind: str, name: str, namespace: str = "ads") -> Callable[[AccountShell], None]:
    return lambda shell: ok(shell.ask(["kubectl", "delete", kind, name, f"--namespace={namespace}"]))


def pool(**changes: object) -> Callable[[AccountShell], None]:
    def change(shell: AccountShell) -> None:
        shell.account.cluster().pools["h100"] = replace(GPUS, **changes)

    return change


def without(resource: str) -> Callable[[AccountShell], None]:
    return pool(allocatable={name: amount for name, amount in GPUS.allocatable.items() if name != resource})


def set_on_cluster(**values: object) -> Callable[[AccountShell], None]:
    def change(shell: AccountShell) -> None:
        for name, value in values.items():
            setattr(shell.account.cluster(), name, value)

    return change


def leave(shell: AccountShell) -> None:
    shell.account.context = ""


def enforce(shell: AccountShell) -> None:
    give(shell, {"apiVersion": "v1", "kind": "Namespace", "metadata": {
        "name": "ads", "labels": {"pod-security.kubernetes.io/enforce": "baseline"}}})


def annotate(shell: AccountShell, account: str = "trainer") -> None:
    ok(shell.ask(["kubectl", "annotate", "serviceaccount", account, "--namespace=ads", "--overwrite",
                  "eks.amazonaws.com/role-arn=arn:aws:iam::123456789012:role/other"]))


LACKS: dict[str, tuple[Callable[[AccountShell], None], list[str], str, str]] = {
    "cluster": (leave, [], "no such cluster", "update-kubeconfig"),
    "version": (set_on_cluster(version="1.28"), [], "1.28", "upgrade to 1.31"),
    "kinds": (lambda shell: None, ["place.target=jobset"], "JobSet", "jobset/releases/download"),
    "namespace": (drop("namespace", "ads"), [], "no namespace ads", "kubectl create namespace ads"),
    "rights": (set_on_cluster(denied={"create jobs.batch", "get pods/log"}), [],
               "you may not create jobs.batch, get pods/log", "kubectl create role embark --namespace=ads"),
    "account": (drop("serviceaccount", "trainer"), [], "no service account trainer",
                "kubectl create serviceaccount trainer --namespace=ads"),
    "identity": (annotate, [], "role/other", f"eks.amazonaws.com/role-arn={IDENTITY}"),
    "registry": (drop("secret", "ghcr"), [], "no secret ghcr", "--docker-server=ghcr.io"),
    "secrets": (drop("secret", "ads-nats"), STREAM, "no Secret ads-nats",
                "kubectl create secret generic ads-nats --namespace ads"),
    "queue": (drop("localqueue", "ads"), [], "LocalQueue ads is not there", "kubectl get localqueues"),
    "claim": (drop("pvc", "shared"), [], "no claim shared", "kubectl describe persistentvolumeclaim shared"),
    "storage_class": (drop("storageclass", "fast"), STREAM, "no class is the default", "place.storage_class"),
    "labels": (pool(labels={}), [], "0 of 2 ready nodes with gpu.nvidia.com/class=H100", "place.node_selector"),
    "taints": (pool(taints=({"key": "dedicated", "value": "nlp", "effect": "NoSchedule"},)), [],
               "not tolerated: dedicated=nlp:NoSchedule", 'place.tolerations = ["dedicated=nlp:NoSchedule"]'),
    "devices": (without("nvidia.com/gpu"), [], "nodes have 0", "gpu-operator"),
    "fabric": (without("rdma/ib"), [], "8 of rdma/ib", "device plugin of rdma/ib"),
    "room": (pool(allocatable={**GPUS.allocatable, "cpu": "64"}), [], "96 of cpu", '"cpu=64"'),
    "admission": (enforce, [], 'violates PodSecurity "baseline:latest"', "kubectl describe namespace ads"),
}
"""What is taken from the cluster for each item, the run that notices, and what is said of it."""


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[AccountShell]:
    made = existing_cluster(tmp_path)
    yield made
    made.account.close()


def verdicts(checks: list[Check]) -> dict[str, str]:
    return {one.name.replace(" ", "_"): one.verdict for one in checks}


def test_a_cluster_that_fulfils_the_contract_is_ready(shell: AccountShell):
    found = verdicts([*check_cluster(spec_of(), shell), *check_cluster(spec_of(*STREAM), shell)])
    assert found == dict.fromkeys(ITEMS, "ok")


@pytest.mark.parametrize("item", ITEMS)
def test_each_item_that_a_cluster_lacks_is_named(shell: AccountShell, item: str):
    change, settings, said, fix = LACKS[item]
    change(shell)
    found = list(check_cluster(spec_of(*settings), shell))
    first = next(one for one in found if one.verdict == "wrong")
    assert first.name.replace(" ", "_") == item
    assert said in first.found
    assert fix in first.fix
    assert _show(Console(quiet=True), found, "the cluster") == 1


def test_the_check_changes_nothing_in_the_cluster(shell: AccountShell):
    cluster = shell.account.cluster()
    before, num_records = copy.deepcopy(cluster.objects), len(shell.account.records)
    list(check_cluster(spec_of(), shell))
    asked = [record.words for record in shell.account.records[num_records:]]
    assert cluster.objects == before
    assert not shell.changes
    assert {words[0] if "--dry-run=server" not in words else "dry run" for words in asked} == {"get", "auth", "dry run"}


@pytest.mark.parametrize("right", ["list nodes", "create pods"])
def test_what_the_user_may_not_read_is_a_warning(shell: AccountShell, right: str):
    shell.account.cluster().denied = {right}
    found = verdicts(list(check_cluster(spec_of(), shell)))
    assert found["labels" if "nodes" in right else "admission"] == "warning"
    assert "wrong" not in found.values()


@pytest.mark.parametrize("state", ["not ready", "too few"])
def test_nodes_that_cannot_take_the_pods_do_not_count(shell: AccountShell, state: str):
    cluster = shell.account.cluster()
    gpus = [node for node in cluster.nodes if node.pool == "h100"]
    if state == "too few":
        cluster.nodes.remove(gpus[0])
    else:
        gpus[0].ready_at = cluster.clock.now + 3600
    found = {one.name: one for one in check_cluster(spec_of(), shell)}
    assert found["labels"].verdict == "wrong"
    assert "1 of 2 ready nodes" in found["labels"].found


def test_nodes_that_an_autoscaler_has_yet_to_start_are_a_warning(shell: AccountShell):
    cluster = shell.account.cluster()
    cluster.pools["h100"] = replace(GPUS, max_nodes=4)
    cluster.resize_pool("h100", 0)
    found = verdicts(list(check_cluster(spec_of(), shell)))
    assert found["labels"] == "warning"
    assert "wrong" not in found.values()


def test_a_server_needs_room_on_nodes_without_accelerators(shell: AccountShell):
    assert "wrong" not in verdicts(list(check_cluster(spec_of(*SERVER), shell))).values()
    shell.account.cluster().pools["cpu"] = replace(OTHERS, allocatable={"cpu": "1", "memory": "2Gi"})
    found = {one.name: one for one in check_cluster(spec_of(*SERVER), shell)}
    assert found["room"].verdict == "wrong"


SERVER = ["place.target=serve", "place.nodes=1", "place.queue=", "place.claim=", "place.resources=[]",
          "place.tolerations=[]", "place.node_selector=[]", f"serve.identity={READER}"]


@pytest.mark.parametrize("settings", [SERVER, STREAM], ids=["serve", "follow"])
@pytest.mark.parametrize(("item", "change", "fix"), [
    ("account", drop("serviceaccount", "embark-serve"), "kubectl create serviceaccount embark-serve --namespace=ads"),
    ("identity", lambda shell: annotate(shell, "embark-serve"), "kubectl annotate serviceaccount embark-serve "
     f"--namespace=ads eks.amazonaws.com/role-arn={READER}"),
    ("secrets", drop("secret", "ads-serve-token"), "kubectl create secret generic ads-serve-token --namespace ads"),
])
def test_what_the_servers_lack_is_named(shell: AccountShell, settings, item: str, change, fix: str):
    assert "wrong" not in verdicts(list(check_cluster(spec_of(*settings), shell))).values()
    change(shell)
    wrong = [one for one in check_cluster(spec_of(*settings), shell) if one.verdict == "wrong"]
    assert wrong[0].name == item
    assert fix in wrong[0].fix


def test_a_server_needs_no_account_of_a_trainer(shell: AccountShell):
    drop("serviceaccount", "trainer")(shell)
    assert "wrong" not in verdicts(list(check_cluster(spec_of(*SERVER), shell))).values()


def test_a_certificate_that_is_not_there_is_named(shell: AccountShell):
    found = {one.name: one for one in check_cluster(spec_of(*SERVER, "serve.tls_secret=ads-tls"), shell)}
    assert found["secrets"].verdict == "wrong"
    assert "kubectl create secret tls ads-tls --namespace ads --cert=" in found["secrets"].fix


def launch(shell: AccountShell, spec: RunSpec) -> Kubernetes:
    backend = Kubernetes(shell, notify=lambda _: None)
    request = LaunchRequest(spec, backend.handle_of(spec))
    backend.check(request)
    backend.submit(request)
    return backend


def test_a_launch_creates_no_namespace_and_no_account(shell: AccountShell):
    spec, cluster = spec_of("place.claim="), shell.account.cluster()
    before = set(cluster.objects)
    backend = launch(shell, spec)
    kinds = {key[0] for key in set(cluster.objects) - before}
    assert kinds - {"Workload"} == {"ConfigMap", "Service", "Job", "Pod"}
    done = backend.cancel(backend.handle_of(spec))
    assert set(cluster.objects) == before
    assert [one.what for one in done.remains] == ["checkpoints and events in s3://ads/runs/ads"]


@pytest.mark.parametrize(("kind", "name"), [("namespace", "ads"), ("pvc", "shared"), ("localqueue", "ads")])
def test_a_launch_into_a_cluster_that_lacks_something_is_refused(shell: AccountShell, kind: str, name: str):
    drop(kind, name)(shell)
    before = dict(shell.account.cluster().objects)
    with pytest.raises(UserError) as refused:
        launch(shell, spec_of(*([] if kind != "namespace" else ["place.queue=", "place.claim="])))
    assert "embark doctor --cloud SPEC" in refused.value.fix
    assert shell.account.cluster().objects == before


@pytest.mark.slow
def test_a_run_trains_in_the_cluster(shell: AccountShell):
    spec = spec_of("place.claim=")
    backend = launch(shell, spec)
    ok(shell.ask(["kubectl", "wait", "job/ads", "--namespace=ads", "--for=condition=Complete", "--timeout=1h"]))
    assert backend.status(backend.handle_of(spec)).state == "succeeded"


class ExistingSession(AccountSession):
    """A session in which kubectl is set to the cluster that exists."""

    server = (str(Path(__file__).with_name("existing_account.py")),)


@pytest.mark.slow
def test_the_guide_s_commands_run_and_the_run_trains(tmp_path: Path):
    state = tmp_path / "state"
    state.mkdir()
    output = ""
    with ExistingSession("aws", state) as session:
        for kind, name, text in BLOCK.findall(GUIDE.read_text()):
            if kind != "run":
                (tmp_path / name).write_text(text)
                continue
            if text.startswith("embark logs"):
                ask_for(state, [("machine lost", "kubectl")])
            done = session.bash(text, tmp_path)
            assert done.returncode == 0, f"{text}\n{done.stdout}"
            output += done.stdout
        ended = session.bash("kubectl wait job/ads --namespace=ads --for=condition=Complete --timeout=1h\n"
                             "embark status ads\nembark cancel ads --yes", tmp_path)
    print(output)
    assert not pending(state), "the machine was not lost"
    assert "the cluster for ads: ready" in output
    assert ended.returncode == 0, ended.stdout
    assert "succeeded" in ended.stdout
    assert "checkpoints and events in /mnt/data/runs/ads" in ended.stdout
    assert "namespace" not in ended.stdout.partition("succeeded")[2]


def test_the_guide_s_table_is_what_doctor_checks():
    spec = importlib.util.spec_from_file_location("make_contract", ROOT / "tools" / "make_contract.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert GUIDE.read_text() == module.page(), "make docs"
    assert set(LACKS) == set(ITEMS)
