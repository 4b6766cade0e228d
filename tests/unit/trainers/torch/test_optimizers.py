"""The rate rises, holds and falls as the spec says."""

import pytest

from embark.spec import TrainSpec
from embark.trainers.torch.optimizers import rate_factor


def factors(train: TrainSpec, num_steps: int = 10) -> list[float]:
    return [rate_factor(train, step, num_steps) for step in range(num_steps + 1)]


def test_without_a_schedule_the_rate_never_moves():
    assert set(factors(TrainSpec())) == {1.0}


def test_the_warm_up_rises_linearly_to_the_full_rate():
    assert factors(TrainSpec(warmup_steps=4))[:5] == [0.25, 0.5, 0.75, 1, 1]


@pytest.mark.parametrize(
    ("decay", "half"), [("linear", 0.5), ("polynomial", 0.25), ("cosine", 0.5)]
)
def test_the_decay_goes_from_the_full_rate_to_the_final_one(decay, half):
    got = factors(TrainSpec(decay=decay))
    assert got[0] == 1
    assert got[5] == pytest.approx(half)
    assert got[10] == pytest.approx(0, abs=1e-12)
    assert got == sorted(got, reverse=True)


def test_the_decay_begins_after_the_warm_up_and_stays_at_the_final_rate():
    got = factors(TrainSpec(decay="linear", warmup_steps=2, decay_start_step=4, decay_steps=4, final_rate=0.2))
    assert got[2:5] == [1, 1, 1]
    assert got[6] == pytest.approx(0.6)
    assert got[8:] == pytest.approx([0.2] * 3)
