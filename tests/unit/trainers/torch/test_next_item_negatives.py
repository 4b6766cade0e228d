"""The loss of the next item against frequent items and items of the batch."""

import math

import pytest
import torch

from embark.spec import ModelSpec
from embark.trainers.torch.networks.jagged import JaggedLayout, JaggedSequence
from embark.trainers.torch.networks.sequences import NextItem

DIM = 4


def network(kind: str = "sasrec") -> NextItem:
    torch.manual_seed(1)
    return NextItem(ModelSpec.model_validate({
        "kind": kind, "num_dense": 0, "embedding_dim": DIM, "tables": [
            {"name": "item", "rows": 20, "pooling": "none", "max_length": 5},
            {"name": "negatives", "shares": "item", "pooling": "none", "max_length": 3}],
        "sequence": {"history": "item", "negatives": "negatives"}})).train()


def sequence(ids: list[list[int]], table: torch.Tensor) -> JaggedSequence:
    flat = torch.tensor([one for some in ids for one in some])
    offsets = torch.tensor([0, *(len(some) for some in ids)]).cumsum(0)
    return JaggedSequence(table[flat], offsets, flat)


HISTORIES, NEGATIVES = [[1, 2, 3], [4, 5, 1, 6]], [[7, 8, 9], [10, 7, 11]]


def test_the_log_of_the_frequency_is_subtracted_from_every_score():
    model, table = network(), torch.randn(20, DIM)
    inputs = {"item": sequence(HISTORIES, table), "negatives": sequence(NEGATIVES, table)}
    plain = model(torch.zeros(2, 0), {}, inputs)
    model.log_frequency = torch.full((20,), math.log(0.05))
    assert torch.allclose(model(torch.zeros(2, 0), {}, inputs), plain, atol=1e-5)
    model.log_frequency[7] = math.log(0.5)  # a frequent negative counts for less
    assert (model(torch.zeros(2, 0), {}, inputs) > plain).all()
    model.log_frequency = torch.full((20,), math.log(0.05))
    model.log_frequency[3] = math.log(0.5)  # and a frequent item has to be expected for it
    changed = model(torch.zeros(2, 0), {}, inputs) - plain
    assert changed.tolist() == pytest.approx([0, -math.log(10), 0, 0, 0], abs=1e-5)


def test_items_of_the_batch_count_unless_the_history_has_them():
    model, table = network(), torch.randn(20, DIM, requires_grad=True)
    model.num_in_batch = 100
    nothing = JaggedSequence(table[:0], torch.zeros(3, dtype=torch.long), torch.zeros(0, dtype=torch.long))
    odds = model(torch.zeros(2, 0), {}, {"item": sequence(HISTORIES, table), "negatives": nothing})
    assert len(odds) == 5
    alone = model(torch.zeros(1, 0), {}, {"item": sequence([[1, 2, 3]], table), "negatives": nothing})
    assert (alone > 9_000).all()  # all items of the batch are its own: there is nothing to lose against
    torch.nn.functional.softplus(-torch.cat([odds, alone])).sum().backward()
    assert torch.isfinite(table.grad).all()
    given = [[5, 6], [2, 3]]  # what the batch offers to each: its targets 2, 3, 5, 1, 6 without the sample's own
    model.num_in_batch = 0
    with torch.no_grad():
        inputs = {"item": sequence(HISTORIES, table), "negatives": sequence(given, table)}
        expected = model(torch.zeros(2, 0), {}, inputs)
    assert torch.allclose(odds, expected, atol=1e-5)


def test_what_sasrec_adds_to_a_row_is_small_at_first():
    model, table = network().eval(), torch.randn(20, DIM)
    encoder, rows = model.encoder, table[[1, 2, 3]]
    with torch.no_grad():
        alone = encoder.norm(rows * DIM**0.5)
        assert torch.allclose(encoder(rows, JaggedLayout(torch.tensor([0, 3]), 3), None), alone, atol=0.2)


def test_how_long_the_rows_are_does_not_change_what_hstu_attends_to():
    model, table = network("hstu").eval(), torch.randn(20, DIM)
    encoder, rows = model.encoder, table[[1, 2, 3]]
    with torch.no_grad():
        encoder.positions.zero_()
        assert torch.allclose(encoder(100 * rows, JaggedLayout(torch.tensor([0, 3]), 3), None),
                              encoder(rows, JaggedLayout(torch.tensor([0, 3]), 3), None), atol=1e-3)
