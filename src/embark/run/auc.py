"""The exact AUC of any predictions, over all ranks: pairs of a click and a non-click are counted in whole numbers, so
the result depends neither on how the samples are split nor on how close their predictions are.

Each rank keeps 5 bytes for each of its own samples; the clicks' predictions go round in pieces of a megabyte."""

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from embark.run.trainer import Ranks

PIECE = 1 << 18  # Predictions of a rank that are sent at once.
Floats = NDArray[Any]


def exact_auc(
    world: Ranks, clicks: Floats, num_others: int, count_halves: Callable[[Floats], int]
) -> tuple[float | None, int]:
    """The share of (click, no click) pairs in the right order, a tie being half right, and the number of samples.

    `clicks` are the predictions for this rank's clicks; `count_halves` says how many of this rank's other samples lie
    below each of some clicks, summed up, where one below counts 2 and an equal one 1. Every rank must call it.
    """
    num_rounds = max(world.gathered(-(-len(clicks) // PIECE)))
    halves = sum(count_halves(piece) for round_ in range(num_rounds)
                 for piece in world.gathered(clicks[round_ * PIECE : (round_ + 1) * PIECE]))
    counts = world.gathered((halves, len(clicks), num_others))
    halves, num_clicks, num_rest = (sum(column) for column in zip(*counts, strict=True))
    num_pairs = num_clicks * num_rest
    return (halves / (2 * num_pairs) if num_pairs else None), num_clicks + num_rest


def halves_counter(others: Floats) -> Callable[[Floats], int]:
    """`count_halves` on the host."""
    ordered = np.sort(others)
    return lambda some: sum(int(np.searchsorted(ordered, some, side).sum()) for side in ("left", "right"))
