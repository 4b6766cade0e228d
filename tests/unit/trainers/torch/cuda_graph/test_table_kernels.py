"""Lookups and updates of rows by Triton are those of plain torch, whatever the ids."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

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

    @property
    def starts(self) -> list[int]:
        return [sum(self.rows[:shard]) for shard in range(len(self.rows))]

    @property
    def flat_ids(self) -> torch.Tensor:
        return torch.cat([i.reshape(-1) for i in self.ids])

    @property
    def about(self) -> torch.Tensor:
        counts = [self.num_samples * n for n in self.num_ids]
        at = [sum(counts[:shard]) for shard in range(len(counts))]
        return torch.tensor([
            [at[s], self.num_ids[s], self.first_rows[s], rows, rows + self.first_rows[s], self.starts[s] * DIM, DIM,
             s * DIM, self.starts[s], at[s]]
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
    table_kernels, _ = kernels
    out = torch.full((case.num_samples, 3 * DIM), torch.nan)
    keys = torch.zeros(case.flat_ids.numel(), dtype=torch.int32)
    error = torch.full((1,), torch.iinfo(torch.int64).max)
    table_kernels.look_up(case.flat_ids, case.weights, case.about, out, keys, error, torch.tensor([7]),
                          num_samples=case.num_samples, max_dim=DIM)
    return out, keys, error


def rows_of(case: Case, shard: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows of the matrix that a shard's ids mean, and which of them are its own."""
    local = case.ids[shard] - case.first_rows[shard]
    is_mine = (local >= 0) & (local < case.rows[shard])
    return (local.clamp(0, case.rows[shard] - 1) + case.starts[shard]).long(), is_mine


def test_rows_are_summed_and_those_of_others_left_out(kernels, case):
    out, _, error = looked_up(kernels, case)
    matrix = case.weights.view(-1, DIM)
    for shard in range(3):
        rows, is_mine = rows_of(case, shard)
        expected = (matrix[rows] * is_mine[..., None]).sum(1)
        torch.testing.assert_close(out[:, shard * DIM : (shard + 1) * DIM], expected)
    assert int(error) == torch.iinfo(torch.int64).max


@pytest.mark.parametrize(("shard", "bad"), [(0, 2), (1, -2), (2, 65)])
def test_an_id_of_no_row_is_noted_with_its_step_and_shard_and_looks_nothing_up(kernels, case, shard, bad):
    case.ids[shard][11, 0] = bad
    out, _, error = looked_up(kernels, case)
    assert (int(error) >> 20, int(error) & 0xFFFFF) == (7, shard)
    assert out.isfinite().all()


@pytest.mark.parametrize("optimizer", ["rowwise_adagrad", "adagrad", "sgd"])
@pytest.mark.parametrize("rate", [0.1, 0.0])
def test_every_touched_row_moves_once_by_the_sum_of_its_gradients(kernels, case, optimizer, rate):
    table_kernels, _ = kernels
    _, keys, _ = looked_up(kernels, case)
    ordered, order = torch.sort(keys, stable=True)
    grads = torch.randn(case.num_samples, 3 * DIM)
    samples = torch.arange(case.num_samples)
    places = torch.cat([(samples * 3 * DIM + s * DIM).repeat_interleave(n) for s, n in enumerate(case.num_ids)])
    shard_of = torch.cat([torch.full((case.num_samples * n,), s) for s, n in enumerate(case.num_ids)]).short()
    shifts = torch.tensor([3, 50, 90])  # the state of each shard lies elsewhere than its rows
    state = torch.rand(case.weights.numel() if optimizer == "adagrad" else 500)
    weights, before = case.weights.clone(), state.clone()
    partial = torch.zeros(table_kernels.partial_shape(keys.numel(), DIM))
    table_kernels.update(ordered, order, places, grads, weights, state, shifts, shard_of, partial,
                         torch.tensor([rate, 9.0]), dim=DIM, eps=1e-6, optimizer=optimizer)
    sums = torch.zeros(sum(case.rows), DIM)
    shift = torch.zeros(sum(case.rows), dtype=torch.long)
    for shard in range(3):
        rows, is_mine = rows_of(case, shard)
        shift[case.starts[shard] : case.starts[shard] + case.rows[shard]] = shifts[shard]
        for which in range(case.num_ids[shard]):
            taken = is_mine[:, which]
            sums.index_add_(0, rows[taken, which], grads[taken, shard * DIM : (shard + 1) * DIM])
    touched = (sums != 0).any(1)
    expected = case.weights.clone().view(-1, DIM)
    if optimizer == "rowwise_adagrad":
        at = torch.arange(sum(case.rows)) + shift
        squares = before[at] + sums.square().mean(1)
        torch.testing.assert_close(state[at[touched]], squares[touched], rtol=1e-5, atol=1e-5)
        change = sums / (squares.sqrt() + 1e-6)[:, None]
    elif optimizer == "adagrad":
        squares = before.view(-1, DIM) + sums.square()
        change = sums / (squares.sqrt() + 1e-6)
    else:
        change = sums
    expected[touched] -= rate * change[touched]
    torch.testing.assert_close(weights.view(-1, DIM), expected, rtol=1e-5, atol=1e-5)
    if rate == 0:
        assert torch.equal(weights, case.weights)
    assert torch.equal(weights.view(-1, DIM)[~touched], case.weights.view(-1, DIM)[~touched])
