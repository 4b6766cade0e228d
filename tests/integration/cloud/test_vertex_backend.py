"""A run's whole life on Vertex AI: against its REST API over HTTP."""

from __future__ import annotations

import json
import threading
import time

import pytest
from integration.cloud.vertex_rest import VertexRest, vertex_rest
from limits import HANG_S

from embark.cli.console import Console
from embark.cli.launch import launch_run
from embark.cli.status import cancel as cancel_command
from embark.cli.status import status as status_command
from embark.errors import ExitCode, Fault, Interrupted, UserError
from embark.launch.backends.vertex import Vertex
from embark.launch.http import HttpClient
from embark.launch.run_registry import find_run, list_runs
from embark.launch.shell import Shell
from embark.spec import load_spec
from embark.store.errors import RetryPolicy

SETTINGS = ["name=dlrm", "place.machine=a2-highgpu-8g", "place.nodes=2", "place.target=vertex", "place.account=our-ads",
            "place.region=us-central1", "store.root=gs://training/runs",
            "place.image=us-central1-docker.pkg.dev/our-ads/embark/embark:1"]
HASTY = RetryPolicy(max_retries=1000, give_up_s=120, first_wait_s=0.05, longest_wait_s=0.2)


@pytest.fixture
def api(tmp_path, monkeypatch):
    with vertex_rest() as server:
        for variable in ("AIPLATFORM", "LOGGING"):
            monkeypatch.setenv(f"CLOUDSDK_API_ENDPOINT_OVERRIDES_{variable}", server.url)
        monkeypatch.setenv("HOME", str(tmp_path))
        monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
        monkeypatch.setenv("COLUMNS", "200")
        monkeypatch.setattr(Vertex, "poll_s", 0.05)
        monkeypatch.setattr(Vertex, "late_s", 0.5)
        yield server


def spec_of(*settings: str):
    return load_spec("quickstart", [*SETTINGS, *settings])


def place(messages: list[str] | None = None, retry: RetryPolicy = HASTY) -> Vertex:
    return Vertex(Shell(), notify=(messages if messages is not None else []).append, retry=retry)


def launched(*settings: str):
    assert launch_run(Console(quiet=True), spec_of(*settings), yes=True, dry_run=False) == 0
    return find_run("dlrm").handle


def test_a_run_lifecycle(api: VertexRest, capsys):
    assert launch_run(Console(), spec_of("place.spot=true", "place.max_hours=3"), yes=True, dry_run=False) == 0
    output = capsys.readouterr().out
    assert "fits 2 x a2-highgpu-8g" in output
    assert "an hour on spot in us-central1" in output
    (job,) = api.jobs.values()
    assert job["name"].startswith("projects/our-ads/locations/us-central1/customJobs/")
    assert [int(pool["replicaCount"]) for pool in job["jobSpec"]["workerPoolSpecs"]] == [1, 1]
    assert job["jobSpec"]["scheduling"]["timeout"] == "10800s"
    assert job["jobSpec"]["scheduling"]["restartJobOnWorkerRestart"] is True
    handle, vertex = find_run("dlrm").handle, place()
    status = vertex.status(handle)
    assert (status.state, status.reason) == ("pending", "Vertex AI has not started it")

    api.move("PENDING")
    api.log("service", "Waiting for job to be provisioned.")
    status = vertex.status(handle)
    assert status.reason == "Vertex AI is provisioning machines in us-central1 (Waiting for job to be provisioned.)"
    api.log("service", "Resources are insufficient in region: us-central1. Please try a different region.",
            severity="WARNING")
    status = vertex.status(handle)
    assert status.state == "pending"
    assert status.reason.startswith("Google has no such machines available in us-central1 now (Resources are")
    assert "place.region" in status.fix

    api.move("RUNNING")
    assert vertex.status(handle).state == "running"
    api.log("service", "Worker pool 1 was preempted; restarting the job.", severity="WARNING")
    status = vertex.status(handle)
    assert (status.state, status.num_restarts, len(status.replicas)) == ("running", 1, 2)
    assert "preempted" in status.reason
    assert [event.is_warning for event in vertex.events(handle)] == [False, True, True]

    api.move("SUCCEEDED")
    assert status_command("dlrm", console=Console()) == ExitCode.DONE
    assert "succeeded" in capsys.readouterr().out
    api.jobs.clear()
    assert status_command("dlrm", console=Console()) == ExitCode.DONE
    output = capsys.readouterr().out
    assert "gone" in output
    assert "gs://training/runs/dlrm" in output


def test_logs_of_all_replicas_are_followed_by_time_and_no_line_comes_twice(api: VertexRest):
    handle, vertex = launched(), place()
    api.move("RUNNING")
    for step in range(3):
        api.log("workerpool0-0", f"step {step} of 0")
        api.log("workerpool1-0", f"step {step} of 1")
    api.log("service", "Job is running.")
    seen = []

    def follow() -> None:
        seen.extend((line.source, line.index, line.text) for line in vertex.logs(handle, follow=True))

    reader = threading.Thread(target=follow, daemon=True)
    reader.start()
    time.sleep(0.3)
    api.log("workerpool1-0", "step 3 of 1")
    time.sleep(0.2)
    api.move("SUCCEEDED")
    time.sleep(0.1)
    api.log("workerpool0-0", "a line that came late")
    reader.join(HANG_S)
    assert not reader.is_alive()
    assert seen == [*((f"workerpool{i}-0", i, f"step {step} of {i}") for step in range(3) for i in (0, 1)),
                    ("workerpool1-0", 1, "step 3 of 1"), ("workerpool0-0", 0, "a line that came late")]


def test_used_up_quota_is_reported_before_anything_is_created(api: VertexRest):
    api.refusal = (429, "RESOURCE_EXHAUSTED", "The following quota metrics exceed quota limits: "
                                              "aiplatform.googleapis.com/custom_model_training_nvidia_a100_gpus")
    with pytest.raises(UserError) as caught:
        launch_run(Console(quiet=True), spec_of(), yes=True, dry_run=False)
    assert "quota aiplatform.googleapis.com/custom_model_training_nvidia_a100_gpus in us-central1 is used up" in str(
        caught.value)
    assert "quotas?project=our-ads" in caught.value.fix
    assert not api.jobs


def test_a_failed_run_says_what_its_exit_code_means(api: VertexRest, capsys):
    launched()
    api.move("FAILED", "The replica workerpool0-0 exited with a non-zero status of 64. To find out more see the logs.")
    assert status_command("dlrm", console=Console()) == ExitCode.OTHER
    assert "the spec or the data is wrong (exit code 64)" in capsys.readouterr().out


def test_unavailable_api_is_retried_and_no_job_is_created_twice(api: VertexRest, monkeypatch):
    monkeypatch.setattr("embark.launch.backend.API_RETRY", HASTY)
    api.num_lost_answers = 1
    handle = launched()
    assert len(api.jobs) == 1
    messages: list[str] = []
    api.down()
    threading.Timer(0.5, api.up).start()
    assert place(messages).status(handle).state == "pending"
    assert "Vertex AI does not answer" in messages[0]
    api.down()
    with pytest.raises(Fault, match="Vertex AI does not answer"):
        place(retry=RetryPolicy(max_retries=2, give_up_s=0.1, first_wait_s=0.05, longest_wait_s=0.05)).status(handle)


def test_a_login_that_has_ended_is_reported_at_once(api: VertexRest):
    handle, messages = launched(), []
    api.login_error = True
    with pytest.raises(UserError, match="refuses your credentials") as caught:
        place(messages).status(handle)
    assert "gcloud auth application-default login" in caught.value.fix
    assert not messages


def test_run_is_launched_once_and_never_without_an_image(api: VertexRest):
    with pytest.raises(UserError, match=r"place\.image is not set"):
        launch_run(Console(quiet=True), spec_of("place.image="), yes=True, dry_run=False)
    launched()
    with pytest.raises(UserError, match="already exists"):
        launch_run(Console(quiet=True), spec_of(), yes=True, dry_run=False)
    assert len(api.jobs) == 1


def test_cancel_waits_for_the_end_and_takes_the_record_away(api: VertexRest, capsys):
    launched()
    api.move("RUNNING")
    api.cancel_s = 0.5
    assert cancel_command("dlrm", yes=True, console=Console()) == 0
    captured = capsys.readouterr()
    assert "removed CustomJob 1000" in captured.out
    assert "gs://training/runs/dlrm" in captured.out
    assert not api.jobs
    assert cancel_command("dlrm", yes=True, console=Console()) == 0
    assert not list_runs().runs


def test_a_dry_run_says_the_requests_and_sends_none(api: VertexRest, capsys):
    assert launch_run(Console(json=True), spec_of(), yes=False, dry_run=True) == 0
    commands = json.loads(capsys.readouterr().out)["commands"]
    assert [words[0] for words in commands] == ["GET", "POST"]
    assert commands[1][1].endswith("/v1/projects/our-ads/locations/us-central1/customJobs")
    assert not api.requests


@pytest.mark.parametrize(("step", "is_after"), [(1, False), (1, True), (2, False), (2, True)])
def test_ctrl_c_at_any_request_says_what_is_there_and_how_to_remove_it(api: VertexRest, monkeypatch, step, is_after):
    """First it is asked whether there is one, then it is made."""
    left = [step]
    original = HttpClient._send

    def cut(self, *words):
        left[0] -= 1
        if left[0] == 0 and not is_after:
            raise KeyboardInterrupt
        done = original(self, *words)
        if left[0] == 0:
            raise KeyboardInterrupt
        return done

    monkeypatch.setattr(HttpClient, "_send", cut)
    with pytest.raises(Interrupted) as caught:
        launch_run(Console(quiet=True), spec_of(), yes=True, dry_run=False)
    assert bool(api.jobs) == (step == 2 and is_after)
    if step == 1:
        assert caught.value.what == "stopped by Ctrl-C; nothing was created"
        assert not list_runs().runs
        return
    assert "a CustomJob dlrm in projects/our-ads/locations/us-central1" in caught.value.what
    assert caught.value.fix == "embark cancel dlrm"
    left[0] = 100
    assert cancel_command("dlrm", yes=True, console=Console(quiet=True)) == 0
    assert not api.jobs
