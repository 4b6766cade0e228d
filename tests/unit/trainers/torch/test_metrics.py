"""The metrics are the ones of the textbooks, however the samples are split."""

import math

import numpy as np
import pytest
import torch

from embark.formatting import format_auc
from embark.trainers.torch.metrics import MetricWindow
from embark.trainers.torch.world import World

ALONE = World(rank=0, world_size=1, local_rank=0, local_world_size=1, device=torch.device("cpu"))


def exact_auc(scores: np.ndarray, label: np.ndarray) -> float:
    """By counting pairs."""
    difference = scores[label == 1][:, None] - scores[label == 0][None, :]
    return float(((difference > 0) + 0.5 * (difference == 0)).mean())


def samples(seed: int, num: int = 3000) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(seed)
    logits = random.normal(-1, 1.5, num).astype(np.float32)
    label = (random.random(num) < 1 / (1 + np.exp(-logits))).astype(np.float32)
    return logits, label


def measured(*batches: tuple[np.ndarray, np.ndarray]) -> dict[str, float]:
    window = MetricWindow(torch.device("cpu"))
    for logits, label in batches:
        window.add(torch.from_numpy(logits), torch.from_numpy(label))
    return window.take(ALONE)


@pytest.mark.parametrize("seed", range(3))
def test_auc_is_the_share_of_pairs_in_the_right_order(seed):
    logits, label = samples(seed)
    assert measured((logits, label))["auc"] == pytest.approx(exact_auc(logits, label), abs=2e-5)


@pytest.mark.parametrize(("centre", "spread", "is_shown"),
                         [(0, 1.5, False), (0, 0.01, True), (-13, 0.5, True), (0, 1e-4, True)])
def test_the_exact_auc_lies_within_the_bound_that_is_shown(centre, spread, is_shown):
    logits, label = samples(4)
    logits = ((logits + 1) / 1.5 * spread + centre).astype(np.float32)
    got = measured((logits, label))
    assert abs(got["auc"] - exact_auc(logits, label)) <= got["auc_error"] + 1e-12
    assert got["auc_error"] < 1e-3 or is_shown
    assert ("±" in format_auc(got)) == is_shown


def test_log_loss_entropy_and_calibration_are_by_the_book():
    logits, label = samples(5)
    p = 1 / (1 + np.exp(-logits.astype(np.float64)))
    loss = -(label * np.log(p) + (1 - label) * np.log(1 - p)).mean()
    rate = label.mean()
    got = measured((logits, label))
    assert got["log_loss"] == pytest.approx(loss, rel=1e-6)
    assert got["normalized_entropy"] == pytest.approx(
        loss / -(rate * math.log(rate) + (1 - rate) * math.log(1 - rate)), rel=1e-6)
    assert got["calibration"] == pytest.approx(p.sum() / label.sum(), rel=1e-6)
    assert got["num_samples"] == len(label)


def test_a_window_in_parts_is_the_window_complete():
    logits, label = samples(7)
    parts = [(logits[i : i + 500], label[i : i + 500]) for i in range(0, len(label), 500)]
    assert measured(*parts) == pytest.approx(measured((logits, label)))


def test_a_perfect_and_a_useless_score():
    label = np.array([0, 0, 1, 1], np.float32)
    assert measured((np.array([-2, -1, 1, 2], np.float32), label))["auc"] == 1
    assert measured((np.zeros(4, np.float32), label))["auc"] == 0.5


def test_extreme_logits_are_counted():
    got = measured((np.array([-1e9, 1e9, 50, -50], np.float32), np.array([0, 1, 1, 0], np.float32)))
    assert got["auc"] == 1
    assert got["num_samples"] == 4


def test_one_class_alone_has_no_auc():
    got = measured((np.array([0.3, 0.1], np.float32), np.zeros(2, np.float32)))
    assert math.isnan(got["auc"])
    assert math.isnan(got["normalized_entropy"])


def test_taking_starts_again():
    window = MetricWindow(torch.device("cpu"))
    window.add(torch.zeros(4), torch.tensor([0.0, 1, 0, 1]))
    window.take(ALONE)
    assert window.take(ALONE)["num_samples"] == 0
