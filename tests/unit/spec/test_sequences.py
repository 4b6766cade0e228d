"""Sequence features, the models that read them and interaction logs: what a spec may say."""

import pytest

from embark.errors import SpecError
from embark.spec import Table, resolve

ITEM = {"name": "item", "rows": 50, "pooling": "none", "max_length": 9}
NEGATIVES = {"name": "negatives", "shares": "item", "pooling": "none", "max_length": 4}
CANDIDATE = {"name": "shown", "shares": "item"}


def spec(kind="sasrec", tables=(ITEM, NEGATIVES), data=None, **roles):
    sequence = roles or {"history": "item", "negatives": "negatives"}
    return resolve({"model": {"kind": kind, "num_dense": 0, "embedding_dim": 8, "tables": list(tables),
                              "sequence": sequence}, "data": data or {}})


def mistakes(*args, **kwargs) -> str:
    with pytest.raises(SpecError) as error:
        spec(*args, **kwargs)
    return str(error.value)


def test_max_length_is_multi_hot_and_a_candidate_is_pooled():
    model = spec("din", (ITEM, CANDIDATE), history="item", candidate="shown").model
    history, shown = model.table_list()
    assert (history.multi_hot, history.is_sequence, shown.multi_hot, shown.pooling) == (9, True, 1, "sum")
    (stored,) = model.stored_tables()
    assert (stored.is_sequence, stored.multi_hot, stored.vectors_per_sample) == (True, 10, 10)


def test_times_have_no_table():
    times = {"name": "at", "pooling": "none", "max_length": 9, "lookup": False}
    model = spec("hstu", (ITEM, NEGATIVES, times), history="item", negatives="negatives", times="at").model
    assert [table.name for table in model.stored_tables()] == ["item"]
    assert model.feature("at").max_width == 0


def test_a_table_without_sequences_is_stored_as_before():
    assert Table(name="a", rows=3).model_dump() == {"name": "a", "rows": 3, "dim": None, "pooling": "sum",
                                                    "multi_hot": 1}


@pytest.mark.parametrize(("tables", "kind", "roles", "what"), [
    (({**ITEM, "max_length": None}, NEGATIVES), "sasrec", {}, "a sequence needs its maximum length"),
    (({**ITEM, "multi_hot": 3}, NEGATIVES), "sasrec", {}, "is not max_length = 9"),
    (({**ITEM, "pooling": "sum"}, NEGATIVES), "sasrec", {}, 'has no effect while pooling is "sum"'),
    ((ITEM, NEGATIVES), "dlrm", {}, "takes pooled features, not sequences"),
    ((ITEM, NEGATIVES), "sasrec", {"history": "items", "negatives": "negatives"}, "is no feature of model.tables"),
    ((ITEM, NEGATIVES), "sasrec", {"history": "item"}, "needs negatives"),
    ((ITEM, NEGATIVES, CANDIDATE), "hstu", {"history": "item", "negatives": "negatives", "candidate": "shown"},
     "needs candidate or negatives, not both"),
    ((ITEM, CANDIDATE), "din", {"history": "item", "candidate": "item"}, "is a sequence"),
    ((ITEM, {"name": "other", "rows": 9}), "din", {"history": "item", "candidate": "other"}, "is of table other"),
    ((ITEM, NEGATIVES, {"name": "user", "rows": 9}), "sasrec", {"history": "item", "negatives": "negatives"},
     "reads its sequence only, not user"),
    ((ITEM, NEGATIVES, {"name": "at", "pooling": "none", "max_length": 8, "lookup": False}), "hstu",
     {"history": "item", "negatives": "negatives", "times": "at"}, "may have 8 values, and the history 9"),
])
def test_what_cannot_be_is_said(tables, kind, roles, what):
    assert what in mistakes(kind, tables, **roles)


def test_an_interaction_log_is_for_models_of_the_next_item():
    assert spec(data={"kind": "interactions", "path": "log.csv"}).data.kind == "interactions"
    assert "does not predict the next one" in mistakes(
        "din", (ITEM, CANDIDATE), {"kind": "interactions", "path": "log.csv"}, history="item", candidate="shown")
    assert "has no effect while data.kind" in mistakes(data={"interactions": {"user": "who"}})
