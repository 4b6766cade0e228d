"""How a batch is shared by the ranks: equally, or not at all."""

from embark.errors import Mistake, SpecError


def divides(batch_size: int, num_ranks: int) -> bool:
    """Every rank gets the same number of samples."""
    return batch_size % num_ranks == 0


def batch_mistakes(batch_size: int, num_ranks: int, ranks: str = "ranks") -> list[Mistake]:
    """What is wrong with `train.batch_size` on so many ranks. `ranks`: what they are called there."""
    if divides(batch_size, num_ranks):
        return []
    lower = batch_size // num_ranks * num_ranks
    sizes = " or ".join(str(size) for size in (lower, lower + num_ranks) if size)
    return [Mistake("", "train.batch_size", str(batch_size), f"does not divide over {num_ranks} {ranks}",
                    f"use {sizes}")]


def samples_per_rank(batch_size: int, num_ranks: int, ranks: str = "ranks") -> int:
    """Raises `SpecError` where the batch does not divide."""
    if mistakes := batch_mistakes(batch_size, num_ranks, ranks):
        raise SpecError(mistakes)
    return batch_size // num_ranks
