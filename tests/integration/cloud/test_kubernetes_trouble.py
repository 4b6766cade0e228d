"""What can go wrong between a run and Kubernetes: an API that is away, a token that has ended, rights, Ctrl-C."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from integration.cloud.kubernetes_api import kubernetes_api
from integration.cloud.kubernetes_launch import LAUNCH, ROOT, SETTINGS, launched, place, settle, spec_of, until
from launch_shells import CtrlC, use_shell
from limits import HANG_S

from embark.cli.console import Console
from embark.cli.launch import launch_run
from embark.cli.status import cancel as cancel_command
from embark.errors import ExitCode, Fault, Interrupted, UserError
from embark.formatting import format_duration
from embark.launch.backend import LaunchRequest
from embark.launch.backends.kubernetes.backend import Kubernetes
from embark.launch.backends.kubernetes.kubectl import Forbidden, NoSuchKind
from embark.launch.run_registry import find_run, list_runs
from embark.launch.shell import Shell
from embark.store.errors import RetryPolicy


@pytest.fixture
def api(tmp_path, monkeypatch):
    with kubernetes_api() as server:
        settle(server, tmp_path, monkeypatch)
        yield server


MINUTE_S = 4.0
"""For a minute, where one request may take 20 s."""
SHORT = RetryPolicy(max_retries=1000, give_up_s=240.0, first_wait_s=0.05, longest_wait_s=0.75, request_s=2.0)


@pytest.mark.parametrize("how", ["refuses", "hangs"])
def test_api_unavailable_for_a_minute_is_retried_with_a_message(api, how):
    """Longer than any one request has patience for: only asking again helps."""
    handle, messages = launched(), []
    assert SHORT.request_s < MINUTE_S < SHORT.give_up_s
    if how == "refuses":
        api.down()
        back = threading.Timer(MINUTE_S, api.up)
    else:
        api.is_hanging = True
        back = threading.Timer(MINUTE_S, lambda: setattr(api, "is_hanging", False))
    back.start()
    assert place(messages, SHORT).status(handle).state == "pending"
    assert messages
    assert "the cluster training does not answer" in messages[0]
    assert "refused" in messages[0] if how == "refuses" else re.search("deadline exceeded|Timeout|in time", messages[0])
    assert f"retrying for {format_duration(SHORT.give_up_s)}" in messages[0]


def test_tailed_log_continues_after_the_api_was_unavailable(api):
    handle = launched("place.nodes=1")
    api.pod("dlrm-0-a", "dlrm", index=0, phase="Running")
    api.log("dlrm-0-a", "before")
    lines = place(retry=SHORT).logs(handle, follow=True)
    assert next(lines).text == "before"
    api.down()
    api.log("dlrm-0-a", "while nobody could see it")
    threading.Timer(MINUTE_S, api.up).start()
    assert next(lines).text == "while nobody could see it"
    api.finish("jobs", "dlrm")
    assert list(lines) == []


def test_an_api_that_stays_away_is_a_fault_with_a_fix(api):
    handle = launched()
    api.down()
    hasty = Kubernetes(Shell(), notify=lambda _: None, retry=RetryPolicy(
        max_retries=2, give_up_s=0.2, first_wait_s=0.1, longest_wait_s=0.1))
    with pytest.raises(Fault, match="the cluster training does not answer") as caught:
        hasty.status(handle)
    assert "cluster-info" in caught.value.fix


def test_an_expired_token_is_reported_at_once_with_the_cloud_s_own_login(api):
    handle = launched()
    api.is_token_good = False
    messages: list[str] = []
    with pytest.raises(UserError, match="refuses your credentials") as caught:
        place(messages).status(handle)
    assert "aws eks update-kubeconfig" in caught.value.fix
    assert not messages, "waiting does not renew a token"


def test_a_token_that_expires_while_a_log_is_followed_is_asked_too(api):
    handle = launched("place.nodes=1")
    api.pod("dlrm-0-a", "dlrm", index=0, phase="Running")
    api.log("dlrm-0-a", "before")
    lines = place(retry=SHORT).logs(handle, follow=True)
    assert next(lines).text == "before"
    api.is_token_good = False
    api.down()
    api.up()
    with pytest.raises(UserError, match="refuses your credentials"):
        next(lines)


def test_refusal_by_the_server_comes_before_anything_is_created(api):
    api.refusal = 'Job.batch "dlrm" is invalid: spec.completions: Invalid value'
    with pytest.raises(UserError, match=r"spec\.completions: Invalid value") as caught:
        launch_run(Console(quiet=True), spec_of(), yes=True, dry_run=False)
    assert not api.names("jobs") | api.names("configmaps") | api.names("services")
    assert "namespace embark" in caught.value.what
    assert "delete namespace embark" in caught.value.fix


def test_a_cluster_without_the_operator_gets_the_install_command(tmp_path, monkeypatch):
    with kubernetes_api(without=("jobset.x-k8s.io/v1alpha2",)) as server:
        settle(server, tmp_path, monkeypatch)
        with pytest.raises(NoSuchKind) as caught:
            launch_run(Console(quiet=True), spec_of("place.target=jobset"), yes=True, dry_run=False)
        assert "install JobSet" in caught.value.fix
        assert not server.objects
        assert not list_runs().runs


def test_a_job_of_that_name_is_not_written_over(api):
    launched()
    with pytest.raises(UserError, match="in namespace embark already exists"):
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


def test_who_has_rights_in_one_namespace_alone_can_launch_there(api):
    api.put("namespaces", "embark", "")
    api.forbidden = ("namespaces",)
    launched()
    assert api.names("jobs") == {"dlrm"}
    api.forbidden = ("jobs",)
    with pytest.raises(Forbidden, match="cannot touch jobs") as caught:
        place().status(find_run("dlrm").handle)
    assert "auth can-i" in caught.value.fix


@pytest.mark.parametrize(("step", "is_after"), [
    (3, False), (5, False), (6, True), *(pytest.param(step, is_after, marks=pytest.mark.slow) for step, is_after in (
        (1, False), (2, False), (4, False), (4, True), (6, False)))])
def test_ctrl_c_at_any_step_says_what_is_there_and_how_to_remove_it(api, monkeypatch, step, is_after):
    use_shell(monkeypatch, lambda: CtrlC(step, is_after=is_after))
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
        assert error.what == "stopped by Ctrl-C; nothing was created"
        assert not list_runs().runs


THERE = {(step, is_after): (step + is_after > 4, step + is_after > 6) for step in range(1, 7) for is_after in (0, 1)}
"""Context, job, namespace are asked for; then come the namespace, the server's dry run and the job."""
SLOW_KUBECTL = """#!/bin/sh
"$KUBECTL" "$@"
code=$?
case "$*" in *dry-run*) exit $code ;; *apply*) exec sleep 600 ;; esac
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
    until(lambda: api.names("namespaces"))
    process.send_signal(signal.SIGINT)
    _, output = process.communicate(timeout=HANG_S)
    assert process.returncode == ExitCode.INTERRUPTED, output
    assert "may exist by now: namespace embark" in output
    assert "Traceback" not in output


def test_ctrl_c_as_the_hand_over_is_reported_says_what_is_there(api, monkeypatch):
    """The very last moment: all is made, and the terminal has not heard of it."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    console = Console(quiet=True)
    monkeypatch.setattr(Console, "result", interrupt)
    with pytest.raises(Interrupted, match=r"dlrm on .* is launched") as caught:
        launch_run(console, spec_of(), yes=True, dry_run=False)
    assert "embark cancel dlrm" in caught.value.fix
    assert find_run("dlrm").is_submitted


def test_what_a_launch_that_was_cut_off_left_is_taken_away_by_cancel(api, monkeypatch, tmp_path):
    original = Kubernetes.submit

    def cut(self, order: LaunchRequest) -> None:
        original(self, order)
        raise KeyboardInterrupt

    monkeypatch.setattr(Kubernetes, "submit", cut)
    with pytest.raises(Interrupted, match="may exist by now: namespace embark"):
        launch_run(Console(quiet=True), spec_of(f"store.root={tmp_path}", "place.nodes=1"), yes=True, dry_run=False)
    assert api.names("jobs") == {"dlrm"}
    assert cancel_command("dlrm", yes=True, console=Console(quiet=True)) == 0
    assert not api.names("jobs")
