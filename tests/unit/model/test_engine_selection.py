"""Which engine `train.engine` gives, and why."""

import pytest

from embark.errors import UserError
from embark.model.engine_selection import cuda_graph_obstacle, select_engine
from embark.spec import resolve


def selected(*sets, device="cuda", on_host=False):
    spec = resolve({}, sets)
    return select_engine(spec, device, cuda_graph_obstacle(spec, device, has_tables_on_host=on_host))


@pytest.mark.parametrize(("sets", "device", "on_host", "engine", "why"), [
    ((), "cuda", False, "cuda_graph", "one CUDA graph"),
    ((), "cpu", False, "pipeline", "no GPU"),
    (("train.engine=pipeline",), "cuda", False, "pipeline", "requested"),
    (("train.engine=cuda_graph",), "cpu", False, "cuda_graph", "one operation at a time"),
    (("train.optimizer=adam",), "cuda", False, "cuda_graph", "one CUDA graph"),
    (("train.optimizer=rowwise_adam",), "cuda", False, "cuda_graph", "one CUDA graph"),
    (("model.num_tables=1025",), "cuda", False, "cuda_graph", "one CUDA graph"),
    (("train.table_dtype=fp16",), "cuda", False, "cuda_graph", "one CUDA graph"),
    (("train.table_dtype=bf16",), "cuda", False, "cuda_graph", "one CUDA graph"),
    (("train.table_dtype=bf16",), "cpu", False, "cuda_graph", "one operation at a time"),
    ((), "cuda", True, "pipeline", "the host's memory"),
    (("model.dropout=0.1", "train.weight_decay=0.1", "train.embedding_l2=0.1", "train.max_gradient_norm=1"), "cuda",
     False, "cuda_graph", "one CUDA graph"),
    (('model.tables=[{ name = "a", rows = 9, learning_rate = 0.1, init_range = 0.1 }, { name = "b", shares = "a" }]',),
     "cuda", False, "cuda_graph", "one CUDA graph"),
])
def test_selection(sets, device, on_host, engine, why):
    found, reason = selected(*sets, device=device, on_host=on_host)
    assert found == engine
    assert why in reason


SEQUENCE = ('model.tables=[{name="item", rows=9, pooling="none", max_length=600}, {name="shown", shares="item"}]',
            "model.sequence.history=item")
RANKER = (*SEQUENCE, "model.sequence.candidate=shown")
NEXT_ITEM = (SEQUENCE[0].replace('"}]', '", pooling="none", max_length=4}]'), SEQUENCE[1], "model.num_dense=0",
             "model.sequence.negatives=shown")


@pytest.mark.parametrize(("sets", "num_ranks", "why"), [
    ((*RANKER, "model.kind=din"), 1, ""),
    ((*RANKER, "model.kind=hstu"), 1, ""),
    ((*NEXT_ITEM, "model.kind=hstu"), 1, ""),
    ((*RANKER, "model.kind=hstu"), 2, "exchanges no rows of sequences between ranks"),
    ((*RANKER, "model.kind=din", "train.table_dtype=bf16"), 1, "rounds no rows of sequences"),
    ((*NEXT_ITEM, "model.kind=sasrec"), 1, "pads histories of sasrec to"),
    ((*NEXT_ITEM, "model.kind=sasrec", "train.engine=cuda_graph"), 1, ""),
])
def test_sequences_are_captured_on_one_gpu(sets, num_ranks, why):
    obstacle = cuda_graph_obstacle(resolve({}, sets), "cuda", has_tables_on_host=False, num_ranks=num_ranks)
    assert why in obstacle if why else not obstacle


def test_an_engine_that_cannot_be_used_is_refused_with_the_reason():
    with pytest.raises(UserError, match=r'train\.engine = "cuda_graph" cannot be used: some tables live'):
        selected("train.engine=cuda_graph", on_host=True)


def test_bf16_tables_without_a_captured_step_are_refused():
    with pytest.raises(UserError, match="bf16 are trained by a captured step only: some tables live in") as raised:
        selected("train.table_dtype=bf16", on_host=True)
    assert "fp16" in raised.value.fix
