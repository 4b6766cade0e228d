"""How a batch is shared: every rank gets the same number of samples, or the spec is refused."""

import math
from collections.abc import Sequence

from embark.errors import Mistake


def divides(batch_size: int, num_ranks: int) -> bool:
    """Every rank gets the same number of samples."""
    return batch_size % num_ranks == 0


def batch_mistakes(batch_size: int, num_ranks: int | Sequence[int], ranks: str = "ranks") -> list[Mistake]:
    """What is wrong with `train.batch_size` on so many ranks, or on each of several numbers of them, as an elastic run
    may have. `ranks`: what they are called there."""
    counts = [num_ranks] if isinstance(num_ranks, int) else list(num_ranks)
    wrong = [count for count in counts if not divides(batch_size, count)]
    if not wrong:
        return []
    each = math.lcm(*counts)
    lower = batch_size // each * each
    sizes = " or ".join(str(size) for size in (lower, lower + each) if size)
    also = f", and the run may have {counts[0]} to {counts[-1]}" if len(counts) > 1 else ""
    return [Mistake("", "train.batch_size", str(batch_size), f"does not divide over {wrong[0]} {ranks}{also}",
                    f"use {sizes}")]
