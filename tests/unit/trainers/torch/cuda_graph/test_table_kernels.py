"""Lookups and updates of rows by Triton are those of plain torch, whatever the ids."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import pytest
import torch

from embark.trainers.torch.cpu_lookup import RowRounding

DIM = 12


@dataclass
class Case:
    """Shards of tables in one flat storage, and ids for them."""

    rows: list[int]
    num_ids: list[int]
    first_rows: list[int]
    """Each shard begins at this row of a table of so many more."""
    ids: list[torch.Tensor]
    weights: torch.Tensor
    num_samples: int
    gaps: tuple[int, ...] = (0, 0, 0)  # Values before each shard that are no shard's.

    @property
    def places(self) -> list[int]:
        """Where the values of each shard begin."""
        return [sum(self.rows[:shard]) * DIM + sum(self.gaps[: shard + 1]) for shard in range(len(self.rows))]

    @property
    def starts(self) -> list[int]:
        return [-(-place // DIM) for place in self.places]

    @property
    def offsets(self) -> list[int]:
        return [place - start * DIM for place, start in zip(self.places, self.starts, strict=True)]

    @property
    def offset_multiple(self) -> int:
        return math.gcd(16, *self.offsets) if any(self.offsets) else 0

    def matrix(self, values: torch.Tensor) -> torch.Tensor:
        """Without what is no shard's."""
        return torch.cat([values[at : at + rows * DIM] for at, rows in zip(self.places, self.rows, strict=True)]).view(
            -1, DIM)

    def spread(self, values: torch.Tensor) -> torch.Tensor:
        """The reverse, of a case without gaps."""
        spread = torch.full((len(values) + sum(self.gaps) + DIM,), torch.nan, dtype=values.dtype)
        for rows, at, of_shard in zip(self.rows, self.places, values.view(-1, DIM).split(self.rows), strict=True):
            spread[at : at + rows * DIM] = of_shard.reshape(-1)
        return spread

    @property
    def flat_ids(self) -> torch.Tensor:
        return torch.cat([i.reshape(-1) for i in self.ids])

    @property
    def about(self) -> torch.Tensor:
        counts = [self.num_samples * n for n in self.num_ids]
        at = [sum(counts[:shard]) for shard in range(len(counts))]
        return torch.tensor([
            [at[s], self.num_ids[s], self.first_rows[s], rows, rows + self.first_rows[s], s * DIM, self.starts[s],
             at[s], 10 + s, self.offsets[s]]
            for s, rows in enumerate(self.rows)
        ])


@pytest.fixture
def case():
    """A table with few rows (runs of equal ids longer than a tile), one with many and lists, a part of another."""
    generator = torch.Generator().manual_seed(1)
    rows, num_ids, first_rows, num_samples = [2, 300, 40], [1, 3, 1], [0, 0, 25], 100

    def ids(low: int, high: int, count: int) -> torch.Tensor:
        return torch.randint(low, high, (num_samples, count), dtype=torch.int32, generator=generator)

    return Case(rows, num_ids, first_rows, [ids(0, 2, 1), ids(-1, 300, 3), ids(0, 65, 1)],
                torch.randn(sum(rows) * DIM, generator=generator), num_samples)


def looked_up(kernels, case: Case):
    table_kernels = kernels[0]
    out = torch.full((case.num_samples, 3 * DIM), torch.nan)
    keys = torch.zeros(case.flat_ids.numel(), dtype=torch.int32)
    error = torch.full((1,), torch.iinfo(torch.int64).max)
    table_kernels.look_up(case.flat_ids, case.weights, case.about, out, keys, error, torch.tensor([7]),
                          num_samples=case.num_samples, dim=DIM, column_multiple=4,
                          offset_multiple=case.offset_multiple)
    return out, keys, error


def rows_of(case: Case, shard: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows of the matrix that a shard's ids mean, and which of them are its own."""
    local = case.ids[shard] - case.first_rows[shard]
    is_mine = (local >= 0) & (local < case.rows[shard])
    return (local.clamp(0, case.rows[shard] - 1) + case.starts[shard]).long(), is_mine


def keys_of(case: Case) -> torch.Tensor:
    """What the lookup gives to the sort: the row of each id, or a number behind all."""
    shards = [rows_of(case, shard) for shard in range(3)]
    return torch.cat([torch.where(is_mine, rows, 2**31 - 1).reshape(-1) for rows, is_mine in shards]).int()


def test_rows_are_summed_and_those_of_others_left_out(kernels, case):
    out, keys, error = looked_up(kernels, case)
    assert torch.equal(keys, keys_of(case))
    matrix = case.weights.view(-1, DIM)
    for shard in range(3):
        rows, is_mine = rows_of(case, shard)
        expected = (matrix[rows] * is_mine[..., None]).sum(1)
        torch.testing.assert_close(out[:, shard * DIM : (shard + 1) * DIM], expected)
    assert int(error) == torch.iinfo(torch.int64).max


@pytest.mark.parametrize(("shard", "bad"), [(0, 2), (1, -2), (2, 65)])
def test_an_id_of_no_row_is_recorded_and_looks_nothing_up(kernels, case, shard, bad):
    case.ids[shard][11, 0] = bad
    out, _, error = looked_up(kernels, case)
    assert (int(error) >> 20, int(error) & 0xFFFFF) == (7, 10 + shard)
    assert out.isfinite().all()


SHIFTS = torch.tensor([3, 50, 90])  # the row-wise state of each shard lies elsewhere than its rows
ORIGINS = torch.tensor([[1000, 0], [2000, 0], [1000, 32]])  # the third shard is other columns of the first one's table
SEED = torch.tensor([12345])
EPS = 1e-6


def updated(kernels, case: Case, grads, *, optimizer="sgd", rate=0.1, l2=0.0, step=7, state=None, second_state=None):
    """The rows of `case` after one step."""
    table_kernels = kernels[0]
    keys = keys_of(case)
    ordered, order = torch.sort(keys, stable=True)
    slots = torch.tensor([[s, int(case.about[s, 7]), n, s * DIM] for s, n in enumerate(case.num_ids) for _ in range(n)],
                         dtype=torch.int32)
    ids = table_kernels.SortedIds(ordered, order, keys.numel(), slots, case.num_samples, 4)
    weights = case.weights.clone()
    partial = torch.zeros(table_kernels.partial_shape(keys.numel(), DIM))
    moved = torch.tensor(replace(case, gaps=(0, 0, 0)).starts) - torch.tensor(case.starts)  # of keys, by gaps
    offsets = torch.tensor(case.offsets) if any(case.offsets) else None
    rows = table_kernels.Rows(weights, state, second_state, SHIFTS + moved, offsets, case.offset_multiple, DIM,
                              optimizer, EPS, l2)
    origins = ORIGINS + torch.stack([moved, torch.zeros_like(moved)], 1)
    rounding = None if weights.dtype == torch.float32 else table_kernels.Rounding(SEED, origins)
    table_kernels.locate(ids, grads.stride(0))
    for has_long_runs in (True, False):
        table_kernels.update(ids, grads, partial, torch.tensor([rate]), torch.tensor([step]), rows, rounding,
                             has_long_runs=has_long_runs)
    return case.matrix(weights)


def gradients_of_rows(case: Case, grads) -> tuple[torch.Tensor, torch.Tensor]:
    """The sum of each row's gradients, and how many ids it has."""
    sums, counts = torch.zeros(sum(case.rows), DIM), torch.zeros(sum(case.rows))
    for shard in range(3):
        rows, is_mine = rows_of(case, shard)
        for which in range(case.num_ids[shard]):
            taken = is_mine[:, which]
            sums.index_add_(0, rows[taken, which], grads[taken, shard * DIM : (shard + 1) * DIM])
            counts += torch.bincount(rows[taken, which], minlength=sum(case.rows))
    return sums, counts


@pytest.mark.parametrize(("optimizer", "rate", "l2"), [
    ("rowwise_adagrad", 0.1, 0.0), ("rowwise_adagrad", 0.0, 0.3), ("adagrad", 0.1, 0.3), ("sgd", 0.1, 0.0),
    ("sgd", 0.0, 0.0), ("adam", 0.1, 0.3), ("rowwise_adam", 0.1, 0.3),
])
def test_every_touched_row_moves_once_by_the_sum_of_its_gradients(kernels, case, optimizer, rate, l2):
    grads = torch.randn(case.num_samples, 3 * DIM)
    of_values, others, of_rows = torch.rand(case.weights.numel()), torch.rand(case.weights.numel()), torch.rand(500)
    first, second = {"rowwise_adagrad": (of_rows, None), "adagrad": (of_values, None), "sgd": (None, None),
                     "adam": (of_values, others), "rowwise_adam": (of_values, of_rows)}[optimizer]
    before = [None if one is None else one.clone() for one in (first, second)]
    weights = updated(kernels, case, grads, optimizer=optimizer, rate=rate, l2=l2, state=first, second_state=second)
    sums, counts = gradients_of_rows(case, grads)
    start = case.weights.view(-1, DIM)
    sums += l2 * counts[:, None] * start
    touched = counts > 0
    at = torch.arange(sum(case.rows)) + SHIFTS.repeat_interleave(torch.tensor(case.rows))
    if optimizer == "rowwise_adagrad":
        squares = before[0][at] + sums.square().mean(1)
        torch.testing.assert_close(first[at[touched]], squares[touched], rtol=1e-5, atol=1e-5)
        change = sums / (squares.sqrt() + EPS)[:, None]
    elif optimizer == "adagrad":
        change = sums / ((before[0].view(-1, DIM) + sums.square()).sqrt() + EPS)
    elif optimizer == "sgd":
        change = sums
    else:
        mean = 0.9 * before[0].view(-1, DIM) + 0.1 * sums
        torch.testing.assert_close(first.view(-1, DIM)[touched], mean[touched], rtol=1e-5, atol=1e-5)
        if optimizer == "adam":
            squares = 0.999 * before[1].view(-1, DIM) + 0.001 * sums.square()
            torch.testing.assert_close(second.view(-1, DIM)[touched], squares[touched], rtol=1e-5, atol=1e-5)
        else:
            of_row = 0.999 * before[1][at] + 0.001 * sums.square().mean(1)
            torch.testing.assert_close(second[at[touched]], of_row[touched], rtol=1e-5, atol=1e-5)
            squares = of_row[:, None]
        change = mean / (1 - 0.9**8) / ((squares / (1 - 0.999**8)).sqrt() + EPS)
    expected = start.clone()
    expected[touched] -= rate * change[touched]
    torch.testing.assert_close(weights, expected, rtol=1e-5, atol=1e-5)
    if rate == 0:
        assert torch.equal(weights, start)
    assert torch.equal(weights[~touched], start[~touched])
    assert touched.any()


@pytest.mark.parametrize(("dtype", "scale"), [(torch.float16, 1.0), (torch.float16, 2e-5), (torch.bfloat16, 1.0)],
                         ids=["normal", "subnormal", "bf16"])
def test_rows_in_16_bits_are_rounded_stochastically_each_step(
    kernels, case, dtype, scale
):
    case.weights = (case.weights * scale).to(dtype)
    case.ids[1] = torch.arange(300, dtype=torch.int32).view(100, 3)
    grads = torch.randn(case.num_samples, 3 * DIM, generator=torch.Generator().manual_seed(2)) * scale * 1e-2
    exact = (case.weights.view(-1, DIM).float() - 0.1 * gradients_of_rows(case, grads)[0]).double()
    half = exact.to(dtype).double()
    towards = torch.where(half < exact, math.inf, -math.inf).to(dtype)
    other = torch.nextafter(exact.to(dtype), towards).double()  # the neighbour behind `exact`, as the nearest sees it
    low, high = torch.minimum(half, other), torch.maximum(half, other)
    chance = (exact - low) / (high - low)
    is_between = (chance > 1e-3) & (chance < 1 - 1e-3)  # nearer to a neighbour, the order of sums decides which side
    chance = chance[is_between]
    assert chance.numel() > 2000
    first, second = (updated(kernels, case, grads, step=step).double() for step in (6, 7))
    for rounded in (first, second):
        is_up = (rounded == high)[is_between]
        assert (is_up | (rounded == low)[is_between]).all()
        for part in (chance < 0.3, (chance >= 0.3) & (chance < 0.7), chance >= 0.7):  # within four standard deviations
            assert abs((is_up.double() - chance)[part].mean()) < 4 * 0.5 / math.sqrt(int(part.sum()))
    assert (first != second)[is_between].float().mean() > 0.2
    assert torch.equal(updated(kernels, case, grads, rate=0.0), case.weights.view(-1, DIM))


def test_plain_torch_rounds_rows_to_bf16_as_the_kernels_do(kernels, case):
    case.weights = case.weights.bfloat16()
    grads = torch.randn(case.num_samples, 3 * DIM)
    grads[:, 0] = torch.nan
    by_kernels = updated(kernels, case, grads)
    case.weights = case.weights.float()
    exact, starts = updated(kernels, case, grads), torch.tensor(case.starts)
    origins = {start * DIM: (int(number + start), int(column))
               for start, (number, column) in zip(case.starts, ORIGINS, strict=True)}
    rounding = RowRounding(int(SEED), torch.tensor([7]), origins)
    rounded = rounding(exact, torch.arange(len(exact)), starts, (starts * DIM).tolist())
    touched = gradients_of_rows(case, grads)[1] > 0
    # A NaN stays one; which of its bits are set, torch decides differently for each width of vectors.
    torch.testing.assert_close(rounded[touched], by_kernels[touched], rtol=0, atol=0, equal_nan=True)
    assert rounded[touched][:, 0].isnan().any()


def test_random_bits_are_those_of_the_table_the_row_and_the_column(kernels, case):
    """Of no other: equal values in different places are rounded independently."""
    case.ids = [torch.zeros_like(case.ids[0]), torch.arange(300, dtype=torch.int32).view(100, 3),
                torch.full_like(case.ids[2], 25)]
    case.weights = torch.ones_like(case.weights).half()
    grads = torch.zeros(case.num_samples, 3 * DIM)
    grads[0, :DIM] = grads[:, DIM : 2 * DIM] = grads[0, 2 * DIM :] = 10 * 2**-12  # half a step of fp16 below 1
    is_down = updated(kernels, case, grads) < 1
    of_table = is_down[2:302]
    assert of_table.float().mean().item() == pytest.approx(0.5, abs=0.05)
    assert of_table.float().mean(0).std() < 0.1
    assert of_table.float().mean(1).std() < 0.25
    assert not torch.equal(is_down[0], is_down[302])


def test_rounding_keeps_nan_and_overflows_to_infinity(kernels, case):
    case.weights = case.weights.half()
    grads = torch.zeros(case.num_samples, 3 * DIM)
    grads[:, 0] = torch.nan
    grads[:, 1] = -1e7
    weights = updated(kernels, case, grads)
    assert weights[:2, 0].isnan().all()
    assert weights[:2, 1].eq(torch.inf).all()


@pytest.mark.parametrize(("optimizer", "dtype", "gaps"), [
    ("rowwise_adagrad", torch.float32, (8, 0, 4)), ("adam", torch.float32, (0, 20, 0)),
    ("rowwise_adam", torch.float16, (4, 4, 16)),
])
def test_tables_of_other_widths_between_them_change_no_bit(kernels, case, optimizer, dtype, gaps):
    case.weights = case.weights.to(dtype)
    grads = torch.randn(case.num_samples, 3 * DIM)
    of_values, others, of_rows = torch.rand(case.weights.numel()), torch.rand(case.weights.numel()), torch.rand(500)
    apart = replace(case, gaps=gaps)
    results = []
    for one, values in ((case, torch.clone), (apart, apart.spread)):
        one.weights = values(case.weights)
        states = {"rowwise_adagrad": (of_rows.clone(), None), "adam": (values(of_values), values(others)),
                  "rowwise_adam": (values(of_values), of_rows.clone()), "sgd": (None, None)}[optimizer]
        out, _, _ = looked_up(kernels, one)
        rows = updated(kernels, one, grads, optimizer=optimizer, state=states[0], second_state=states[1])
        held = [x if x is None or len(x) == len(of_rows) else one.matrix(x) for x in states]
        results.append((out, rows, *(x for x in held if x is not None)))
    assert all(offset % 4 == 0 and offset <= 0 for offset in apart.offsets)
    assert any(apart.offsets)
    for even, uneven in zip(*results, strict=True):
        assert torch.equal(even, uneven)
