"""Rendered jobs of each cloud and kind, run as processes: they train to the end alike, whatever happens to a pod."""

from __future__ import annotations

import random
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from integration.cloud.image import common_folder
from integration.cloud.rehearsals import (
    NUM_STEPS,
    assert_trained,
    rehearse_elastic,
    rehearse_quickstart,
    undisturbed_loss,
)

pytestmark = pytest.mark.slow

LAST_STEP = 25
"""A fault at a later step might come when the run is over already."""


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory, warm_python) -> float:
    return undisturbed_loss(common_folder(tmp_path_factory.getbasetemp()), warm_python)


def test_a_pod_that_is_killed_comes_back_and_the_run_continues_bit_for_bit(undisturbed, warm_python):
    step = random.SystemRandom().randrange(2, LAST_STEP)
    answer = rehearse_quickstart("azure", "--kill", f"1@step{step}", target="jobset", python=warm_python)
    assert_trained(answer)
    assert answer["verdict"]["final_loss"] == undisturbed, f"killed at step {step}"
    assert answer["progress"]["resumes"]
    assert any(end["is_preempted"] and end["code"] == 137 for end in answer["ends"])


def test_a_preempted_pod_saves_in_its_grace_and_loses_no_step(undisturbed, warm_python):
    answer = rehearse_quickstart("gcp", "--preempt", "0@step10", target="trainjob", python=warm_python)
    assert_trained(answer)
    assert answer["verdict"]["final_loss"] == undisturbed
    assert answer["verdict"]["lost_steps"] == 0
    # the other pod's end counts as no failure
    assert [end["code"] for end in answer["ends"]] == [75, 75, 0, 0], answer


def test_tasks_of_a_batch_job_save_and_all_start_again(undisturbed, warm_python):
    answer = rehearse_quickstart("aws", "--preempt", "1@step10", target="slurm", python=warm_python)
    assert_trained(answer)
    assert answer["verdict"]["final_loss"] == undisturbed
    assert answer["verdict"]["lost_steps"] == 0
    assert [end["code"] for end in answer["ends"]] == [75, 75, 0, 0], answer


def test_tasks_of_a_batch_job_that_call_the_spec_wrong_start_once():
    with TemporaryDirectory(dir="/var/tmp") as venv:  # a pod has a /tmp of its own
        program = Path(venv, "bin", "python")
        program.parent.mkdir()
        program.write_text(f"#!/bin/bash\necho started >> {venv}/starts\nexit 64\n")
        program.chmod(0o755)
        answer = rehearse_quickstart("aws", "--set", f"place.slurm.venv={venv}", target="slurm")
        starts = Path(venv, "starts").read_text().split()
    assert (answer["verdict"]["is_ok"], answer["finish"]) == (False, "failed")
    assert 128 + 64 in {end["code"] for end in answer["ends"]}
    assert 1 <= len(starts) <= 2


def test_an_elastic_job_goes_on_without_a_machine_that_nothing_replaces(warm_python):
    answer = rehearse_elastic("pytorchjob", "--lose", "2@step20", python=warm_python)
    assert answer["verdict"]["is_ok"], answer
    assert answer["progress"]["world_sizes"] == [3, 2]
    assert answer["progress"]["step"] == NUM_STEPS
    lost, *others = [(end["name"].rpartition("-")[2], end["code"]) for end in answer["ends"]]
    assert lost == ("2", 137)
    # how often ranks are started again until they meet depends on the machine's load; what completes the job does not
    assert others[-1][1] == 0
    assert answer["progress"]["resumes"]


def test_elastic_pods_outlive_a_preempted_one_and_take_it_back(warm_python):
    answer = rehearse_elastic("job", "--preempt", "2@step20", python=warm_python)
    assert answer["verdict"]["is_ok"], answer
    sizes = answer["progress"]["world_sizes"]
    assert sizes[0] == 3
    assert set(sizes) <= {2, 3}
    assert answer["verdict"]["lost_steps"] == 0
    codes = [(end["name"].rpartition("-")[2], end["code"]) for end in answer["ends"]]
    assert codes[0] == ("2", 75)
    assert {code for _, code in codes[1:]} == {0}
