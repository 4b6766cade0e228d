"""Killed while it trains on prepared data, a run resumes at the very row it was at, in the order it had."""

from __future__ import annotations

import signal

import pytest
from integration.faults.conftest import Run
from prepared_rows import make_prepared

from embark.data.prepared import Feature

pytestmark = pytest.mark.slow

FEATURES = (Feature("user", 301), Feature("item", 100, 3, is_ragged=True), Feature("shop", 7))
NUM_STEPS = 55
"""Of 20 an epoch: two epochs end on the way."""


@pytest.fixture(scope="module")
def sets(tmp_path_factory) -> tuple[str, ...]:
    """Sixteen blocks in several files, so that the order of each is at stake."""
    path = tmp_path_factory.mktemp("prepared")
    made = make_prepared(path, FEATURES, train=1_000, validation=96, num_dense=4)
    made_parts = made.manifest.parts["train"]
    assert len(made_parts) > 3
    return (f"train.num_steps={NUM_STEPS}", "data.kind=prepared", f"data.path={path}", "store.checkpoint_every=7")


@pytest.fixture(scope="module")
def undisturbed(zygote, tmp_path_factory, sets) -> Run:
    run = Run(zygote, tmp_path_factory.mktemp("undisturbed"), sets=sets)
    assert run.ends(2) == [0, 0], run.output()
    assert sorted(run.losses()) == list(range(1, NUM_STEPS + 1))
    return run


def test_a_kill_changes_no_loss(run, undisturbed, sets):
    run.sets = sets
    for step in (7, 21, 35):
        ranks = run.start(2)
        ranks.until(lambda step=step: max(run.committed(), default=0) >= step)
        ranks.kill(signal.SIGKILL)
        ranks.codes()
    assert run.ends(2) == [0, 0], run.output()
    assert len(run.events("resume")) == 3
    expected = undisturbed.losses()
    assert {step: set(losses) for step, losses in run.losses().items()} == {
        step: set(losses) for step, losses in expected.items()}


def test_the_order_of_an_epoch_is_at_stake(run, undisturbed, sets):
    """Were the rows in another order, the losses would tell: so the test above can fail."""
    run.sets = (*sets, "data.shuffle=none")
    assert run.ends(2) == [0, 0], run.output()
    assert run.losses() != undisturbed.losses()
