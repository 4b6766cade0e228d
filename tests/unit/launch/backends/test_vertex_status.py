"""What Vertex AI says of a job, in one sentence with a fix."""

from __future__ import annotations

import pytest

from embark.launch.backend import RunEvent
from embark.launch.backends.vertex import entry_event, entry_line, explain_message, status_of


@pytest.mark.parametrize(
    ("result", "begins", "fix"),
    [
        (
            "The following quota metrics exceed quota limits: "
            "aiplatform.googleapis.com/custom_model_training_nvidia_l4_gpus",
            "the project's quota aiplatform.googleapis.com/custom_model_training_nvidia_l4_gpus in us-east1 is used up",
            "quotas?project=ads",
        ),
        (
            "Quota exceeded for quota metric 'Custom jobs'",
            "a quota of the project in us-east1 is used up",
            "project=ads",
        ),
        (
            "Resources are insufficient in region: us-east1. Please try a different region.",
            "Google has no such machines available in us-east1 now",
            "another place.region",
        ),
        (
            "The zone 'us-east1-b' does not have enough resources available to fulfill the request.",
            "Google has no such machines available in us-east1 now",
            "another place.region",
        ),
        ("Worker pool 0 was preempted.", "a spot machine was preempted", "place.spot = false"),
        ('Failed to pull image "us-docker.pkg.dev/ads/e:1"', "the image cannot be pulled", "Artifact Registry"),
        (
            "Permission 'aiplatform.customJobs.create' denied on resource",
            "an account lacks a permission",
            "aiplatform.user",
        ),
        (
            "The replica workerpool0-0 exited with a non-zero status of 64.",
            "the spec or the data is wrong",
            "embark logs",
        ),
    ],
)
def test_each_known_message_has_its_cause_and_a_fix(result, begins, fix):
    found = explain_message(result, region="us-east1", project="ads")
    assert found.text.startswith(begins)
    assert result in found.text
    assert fix in found.fix


def test_an_unknown_message_is_reported_as_it_is():
    assert explain_message("something new", region="us-east1", project="ads").text == "something new"


def status(state: str, *events: str, error: str = ""):
    run_events = [RunEvent(float(at), "service", "Info", text, False) for at, text in enumerate(events)]
    job = {"state": f"JOB_STATE_{state}", "createTime": "2026-11-15T09:00:00Z",
           **({"error": {"message": error}} if error else {})}
    return status_of(job, run_events, num_nodes=2, region="us-east1", project="ads", run_uri="gs://b/runs/x")


def test_every_state_of_a_job_has_a_word_of_ours():
    assert [status(word).state for word in
            ("QUEUED", "PENDING", "RUNNING", "SUCCEEDED", "FAILED", "CANCELLING", "CANCELLED", "EXPIRED")] == [
        "pending", "pending", "running", "succeeded", "failed", "pending", "gone", "failed"]
    assert status("EXPIRED").reason.startswith("it exceeded its time limit")
    assert status("FAILED").fix == "embark logs says why"
    assert status("PENDING", "Resources are insufficient in region: us-east1").fix.startswith("another place.region")
    assert status("RUNNING").since_s == 1_794_733_200.0


def test_a_line_has_its_replica_and_what_the_service_says_is_an_event():
    entry = {"timestamp": "2026-11-15T09:00:00.5Z", "severity": "ERROR", "textPayload": "boom\n",
             "resource": {"labels": {"task_name": "workerpool1-2"}}}
    line = entry_line(entry)
    assert (line.source, line.index, line.text, line.time_ns) == ("workerpool1-2", 3, "boom", 1_794_733_200_500_000_000)
    event = entry_event({**entry, "resource": {"labels": {"task_name": "service"}}})
    assert (event.text, event.is_warning) == ("boom", True)
