"""A run that is asked to stop saves the step it is at and ends with 75, wherever the asking finds it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from http_servers import HttpHandler, serve
from integration.faults.conftest import SPEC, Run
from limits import HANG_S

pytestmark = pytest.mark.slow

PLACES = {
    "a step": ("embark.trainers.torch.engines.pipeline:PipelineEngine.step", ""),
    "a save": ("embark.store.object_store:LocalStore.write", "rank-0000"),
    "a save's last moment": ("embark.store.object_store:LocalStore.create", "commit.json"),
    "an evaluation": ("embark.data.synthetic:SyntheticSource.eval_rows", ""),
    "the loader": ("embark.data.synthetic:SyntheticSource.train_rows", ""),
}
BEFORE = {
    "joining the other ranks": ("embark.run.preemption_notices:NoticeWatch.__enter__", ""),
    "looking for a checkpoint": ("embark.trainers.torch.checkpoint:TorchCheckpointer.load_newest", ""),
}


@pytest.mark.parametrize("place", PLACES)
def test_sigterm_loses_nothing(run, undisturbed, tmp_path, place):
    method, word = PLACES[place]
    mark = tmp_path / "mark"
    ranks = run.start(
        2,
        "train.eval_every=2",
        "store.checkpoint_every=2",
        hook="integration.faults.hooks:slow",
        method=method,
        word=word,
        seconds=0.25,
        mark=str(mark),
    )
    ranks.until(lambda: mark.exists() and run.last_step() >= (1 if place in ("a step", "the loader") else 2))
    ranks.kill(signal.SIGTERM)
    codes, stopped = ranks.codes(), run.last_step()
    assert codes == [75, 75], run.output()
    assert 0 < stopped < 12
    assert run.committed()[-1] == stopped
    assert [e["signal"] for e in run.events("interrupt")] == ["SIGTERM"]
    assert f"stopped by SIGTERM at step {stopped} of 12" in run.output()
    resumes_to_the_same_losses(run, undisturbed, stopped)


@pytest.mark.parametrize("place", BEFORE)
def test_sigterm_before_the_first_step_waits_for_none(run, undisturbed, tmp_path, place):
    method, word = BEFORE[place]
    mark = tmp_path / "mark"
    ranks = run.start(2, hook="integration.faults.hooks:slow", method=method, word=word, seconds=0.3, mark=str(mark))
    ranks.until(mark.exists)
    ranks.kill(signal.SIGTERM)
    assert ranks.codes() == [75, 75], run.output()
    assert run.losses() == {}
    assert run.committed() == []
    resumes_to_the_same_losses(run, undisturbed, 0)


@pytest.mark.parametrize(("name", "rank"), [("SIGTERM", 0), ("SIGTERM", 1), ("SIGUSR1", 1)])
def test_a_signal_to_one_rank_stops_both_at_one_step(run, name, rank):
    ranks = run.start(2, "train.num_steps=100000", "train.num_epochs=10000")
    ranks.until(lambda: run.last_step() > 2)
    ranks.kill(signal.Signals[name], rank)
    assert ranks.codes() == [75, 75], run.output()
    assert [e["signal"] for e in run.events("interrupt")] == [name]
    assert run.committed()[-1] == run.last_step()


def test_a_second_sigterm_changes_nothing(run, tmp_path):
    """Kubernetes sends one, its sidecars and launchers another."""
    mark = tmp_path / "mark"
    ranks = run.start(
        2,
        hook="integration.faults.hooks:slow",
        method="embark.store.object_store:LocalStore.write",
        word="rank-0000",
        seconds=0.2,
        mark=str(mark),
    )
    ranks.until(lambda: run.last_step() >= 1)
    ranks.kill(signal.SIGTERM)
    ranks.until(mark.exists)
    ranks.kill(signal.SIGTERM)
    assert ranks.codes() == [75, 75], run.output()
    assert run.committed()[-1] == run.last_step()


@pytest.mark.parametrize(
    ("is_torch_there", "expected"), [(False, ""), (True, "stopped by SIGTERM at step 0 of 12")],
    ids=["before the trainer listens", "while torch is imported"],
)
def test_sigterm_while_python_still_imports(tmp_path, is_torch_there, expected):
    """At the very start there is nothing to lose, and the exit code still says: start me again."""
    spec = tmp_path / "spec.toml"
    spec.write_text(SPEC)
    process = subprocess.Popen([sys.executable, "-m", "embark", "train", str(spec), "--set", f"store.root={tmp_path}"],
                               stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=tmp_path,
                               env={**os.environ, "OMP_NUM_THREADS": "1"})
    until = time.monotonic() + HANG_S
    # SIGUSR1: whoever measures coverage may have a handler for SIGTERM, too.
    while not (listens(process.pid, signal.SIGUSR1) and has_torch(process.pid) >= is_torch_there):
        assert time.monotonic() < until
        time.sleep(0.005)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=HANG_S)
    assert process.returncode == 75, output
    assert expected in output


def test_a_notice_of_the_cloud_saves_and_stops(run, metadata_server):
    ranks = run.start(2, "train.num_steps=100000", "train.num_epochs=10000",
                      env={"GCE_METADATA_HOST": f"127.0.0.1:{metadata_server.port}"})
    ranks.until(lambda: run.last_step() > 2)
    metadata_server.preempted.set()
    assert ranks.codes() == [75, 75], run.output()
    assert [e["signal"] for e in run.events("interrupt")] == ["notice"]
    assert run.committed()[-1] == run.last_step()
    assert {requests for requests in metadata_server.asked if "preempted" not in requests} <= {
        "/computeMetadata/v1/instance/maintenance-event"}


def resumes_to_the_same_losses(run: Run, undisturbed: Run, stopped: int) -> None:
    assert run.ends(2) == [0, 0], run.output()
    assert [e["step"] for e in run.events("resume")] == ([stopped] if stopped else [])
    assert run.losses() == undisturbed.losses()


def listens(pid: int, number: signal.Signals) -> bool:
    """Has the process a handler of its own for the signal?"""
    caught = Path(f"/proc/{pid}/status").read_text().partition("SigCgt:")[2].split()[0]
    return bool(int(caught, 16) >> (number - 1) & 1)


@pytest.fixture
def metadata_server():
    """Google's, as far as a preemption goes: one question hangs until the value changes or its time is up."""

    class Handler(HttpHandler):
        def do_GET(self) -> None:  # noqa: N802
            path, _, query = self.path.partition("?")
            server.asked.append(path)
            if self.headers.get("Metadata-Flavor") != "Google":
                self.send_error(403)
                return
            if "wait_for_change=true" in query:
                server.preempted.wait(float(query.partition("timeout_sec=")[2].partition("&")[0]))
            value = "NONE"
            if path.endswith("/preempted"):
                value = "TRUE" if server.preempted.is_set() else "FALSE"
            self.answer(200, value, headers={"Metadata-Flavor": "Google", "ETag": f"e{value}"})

    with serve(Handler) as server:
        server.preempted, server.asked = threading.Event(), []
        yield server
        server.preempted.set()


def has_torch(pid: int) -> bool:
    return "libtorch" in Path(f"/proc/{pid}/maps").read_text()
