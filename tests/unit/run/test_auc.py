"""The held-out AUC is scikit-learn's for any predictions, however the samples are split over ranks."""

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from limits import HANG_S

from embark.run import evaluation as module
from embark.run.evaluation import exact_auc, halves_counter
from embark.trainers.torch.metrics import HeldOut
from embark.trainers.torch.world import World

ALONE = World(rank=0, world_size=1, local_rank=0, local_world_size=1, device=torch.device("cpu"))
CASES = {  # Center and spread of the logits, the grid they are rounded to, and roc_auc_score of scikit-learn 1.9.1.
    "ordinary": (-1.0, 1.5, 0.0, 0.727698433167838),
    "spread 0.01": (0.0, 0.01, 0.0, 0.7276985824240644),
    "spread 0.001": (0.0, 0.001, 0.0, 0.7276985824240644),
    "around -13": (-13.0, 0.1, 0.0, 0.7276985824240644),
    "around -14": (-14.0, 0.001, 0.0, 0.7276985824240643),
    "ties": (-1.0, 1.5, 0.5, 0.726786626880927),
    "all equal": (-3.0, 0.0, 0.0, 0.5),
    "huge": (0.0, 1e30, 0.0, 0.727698433167838),
}


def samples(center: float, spread: float, grid: float, num: int = 4001) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(7)
    score = random.standard_normal(num)
    label = (random.random(num) < 1 / (1 + np.exp(1 - score))).astype(np.float32)
    logits = center + spread * score
    return (np.round(logits / grid) * grid if grid else logits).astype(np.float32), label


class Meeting:
    """Ranks that are threads."""

    def __init__(self, num: int) -> None:
        self._barrier, self._values = threading.Barrier(num), [None] * num

    def gathered(self, rank: int, value: object) -> list[object]:
        self._values[rank] = value
        self._barrier.wait(HANG_S)
        values = list(self._values)
        self._barrier.wait(HANG_S)
        return values


class Rank:
    def __init__(self, meeting: Meeting, rank: int) -> None:
        self._meeting, self._rank = meeting, rank

    def gathered(self, value: object) -> list[object]:
        return self._meeting.gathered(self._rank, value)


@pytest.mark.parametrize("case", CASES)
def test_the_held_out_auc_is_scikit_learns(case):
    *form, expected = CASES[case]
    logits, label = samples(*form)
    held_out = HeldOut(ALONE)
    for i in range(0, len(label), 1000):
        held_out.add(torch.from_numpy(logits[i : i + 1000]), torch.from_numpy(label[i : i + 1000]))
    got = held_out.metrics()
    assert got["auc"] == pytest.approx(expected, abs=1e-12)
    assert got["num_samples"] == len(label)


@pytest.mark.parametrize("case", CASES)
def test_ranks_agree_bit_for_bit_with_one_rank(case, monkeypatch):
    monkeypatch.setattr(module, "PIECE", 100)
    logits, label = samples(*CASES[case][:3])
    meeting, is_click = Meeting(3), label > 0.5
    parts = (slice(0, 7), slice(7, 3000), slice(3000, None))  # The first has few samples, or none of a kind.

    def rank(number: int) -> tuple[float | None, int]:
        mine, clicks = logits[parts[number]], is_click[parts[number]]
        others = mine[~clicks]
        return exact_auc(Rank(meeting, number), mine[clicks], len(others), halves_counter(others))

    with ThreadPoolExecutor(3) as pool:
        found = set(pool.map(rank, range(3)))
    alone = HeldOut(ALONE)
    alone.add(torch.from_numpy(logits), torch.from_numpy(label))
    assert found == {(alone.metrics()["auc"], len(label))}


def test_one_class_alone_has_no_auc_and_nan_is_counted_as_zero():
    held_out = HeldOut(ALONE)
    held_out.add(torch.tensor([0.3, float("nan")]), torch.zeros(2))
    assert np.isnan(held_out.metrics()["auc"])
    held_out.add(torch.tensor([0.1]), torch.ones(1))
    assert held_out.metrics()["auc"] == 0.5
