"""Rendered jobs of each cloud in real containers of the rendered image: by name, as their user, through every fault."""

from __future__ import annotations

import random

import pytest
from cloud.image import WARM, common_folder
from cloud.rehearsals import assert_trained, rehearse_quickstart, undisturbed_loss

pytestmark = [pytest.mark.slow, pytest.mark.needs("podman")]

ENGINE = ("--engine", "podman", "--image", WARM)
LAST_STEP = 25


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory) -> float:
    return undisturbed_loss(common_folder(tmp_path_factory.getbasetemp()))


@pytest.mark.parametrize("cloud", ["aws", "azure", "gcp"])
def test_the_pods_of_a_rendered_job_meet_by_name_and_train_to_the_end(cloud, image_store, undisturbed):
    answer = rehearse_quickstart(cloud, *ENGINE, path=image_store.wrapper)
    assert_trained(answer)
    assert answer["engine"] == "podman"
    assert answer["final_loss"] == undisturbed
    assert_nothing_is_left(image_store)


@pytest.mark.parametrize(("cloud", "target", "fault"), [
    ("aws", "job", "--kill=0@step{step}"),
    ("azure", "jobset", "--preempt=1@step{step}"),
    ("gcp", "trainjob", "--pause=1@step{step}+4s"),
    ("gcp", "job", "--cut=1@step{step}+5s"),
])
def test_whatever_happens_to_a_pod_the_run_ends_as_if_nothing_had(cloud, target, fault, image_store, undisturbed):
    step = random.SystemRandom().randrange(2, LAST_STEP)
    answer = rehearse_quickstart(cloud, *ENGINE, fault.format(step=step), target=target, path=image_store.wrapper)
    assert_trained(answer)
    assert answer["final_loss"] == undisturbed, f"at step {step}"
    assert bool(answer["resumed_from"]) == (fault.startswith(("--kill", "--preempt")))
    assert_nothing_is_left(image_store)


def assert_nothing_is_left(image_store) -> None:
    """Of this rehearsal: another worker may have one of its own."""
    left = image_store.podman("ps", "--all", "--filter", "status=exited", "--format", "{{.Names}}").stdout.split()
    assert not [name for name in left if name.startswith("embark-rehearse-")]
