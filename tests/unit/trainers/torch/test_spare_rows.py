"""Networks over sequences with spare rows, as a captured step has them: the same numbers, whatever the room."""

from __future__ import annotations

import pytest
import torch
from captured_kinds import refuse_waiting
from torch.nn.functional import pad

from embark.spec import resolve
from embark.trainers.torch.networks.jagged import JaggedSequence
from embark.trainers.torch.networks.sequences import sequence_network

LENGTHS = [3, 1, 0, 8, 5]
TIMES = ", {name='at', lookup=false, pooling='none', max_length=8}"
ITEM = "{name='item', rows=40, pooling='none', max_length=8}"
NEGATIVES = "{name='negatives', shares='item', pooling='none', max_length=3}"
RANKED = (f"model.tables=[{ITEM}, {{name='shown', shares='item'}}{TIMES}]", "model.sequence.candidate=shown")
NEXT = (f"model.tables=[{ITEM}, {NEGATIVES}]", "model.sequence.negatives=negatives")
TIMED = (f"model.tables=[{ITEM}, {NEGATIVES}{TIMES}]", NEXT[1], "model.sequence.times=at")
MODELS = {
    "din": (RANKED[0].replace(TIMES, ""), RANKED[1], "model.kind=din"),
    "hstu ranker": (*RANKED, "model.kind=hstu", "model.sequence.times=at"),
    "hstu": (*TIMED, "model.kind=hstu"),
    "sasrec": (*TIMED, "model.kind=sasrec"),
    "shared negatives": (*NEXT, "model.kind=sasrec", "model.sequence.share_negatives=true"),
    "negatives in the batch": (*NEXT, "model.kind=sasrec"),
    "more negatives than the batch has": (*NEXT, "model.kind=hstu"),
}


def found(which, num_spare):
    """Return the outputs that count, and the gradients of rows and weights."""
    model = resolve({}, ["model.num_dense=0", "model.embedding_dim=8", "model.top_mlp=[8]", "model.dropout=0.3",
                         "model.sequence.history=item", *MODELS[which]]).model
    torch.manual_seed(3)
    network = sequence_network(model)
    if "batch" in which:
        network.log_frequency = torch.randn(40)
        network.num_in_batch = 4 if "in the batch" in which else 30
    total, offsets = sum(LENGTHS), torch.tensor([0, *LENGTHS]).cumsum(0).int()
    history, others = (torch.randn(num, 8) for num in (total, 3 * len(LENGTHS)))
    candidate = torch.randn(len(LENGTHS), 8).requires_grad_()
    ids, stamps = torch.randint(1, 40, (total,)), torch.randint(10**6, (total,)).sort().values
    other_ids = torch.randint(1, 40, (len(others),))
    history = pad(history, (0, 0, 0, num_spare)).requires_grad_()
    others.requires_grad_()
    ids, stamps = (pad(one, (0, num_spare), value=-1).int() for one in (ids, stamps))
    sequences = {"item": JaggedSequence(history, offsets, ids), "at": JaggedSequence(stamps, offsets, stamps)}
    if model.is_next_item:
        sequences["negatives"] = JaggedSequence(others, torch.arange(len(LENGTHS) + 1).int() * 3, other_ids.int())
    rows = [history, others] if model.is_next_item else [history, candidate]
    parameters = list(network.parameters())

    def run():
        return network(torch.zeros(len(LENGTHS), 0), {"shown": candidate}, sequences, has_spare_rows=num_spare > 0)

    if num_spare:
        with refuse_waiting():
            out = run()
    else:
        out = run()
    if isinstance(out, tuple):
        out, is_there = out
        assert is_there.sum() == sum(max(length - 1, 0) for length in LENGTHS)
        assert not out[~is_there].any()
        out = out[is_there]
    weights = torch.arange(1, len(out) + 1) / len(out)
    gradients = torch.autograd.grad((out.sigmoid() * weights).sum(), [*rows, *parameters], allow_unused=True)
    assert not gradients[0][total:].any()
    return [out, gradients[0][:total], *gradients[1:]]


@pytest.mark.parametrize("which", MODELS)
def test_spare_rows_change_nothing(which):
    exact = found(which, 0)
    for num_spare in (1, 40):
        for mine, wanted in zip(found(which, num_spare), exact, strict=True):
            assert (mine is None) == (wanted is None)
            if mine is not None:
                torch.testing.assert_close(mine, wanted, rtol=1e-5, atol=1e-6)
