"""`[model.sequence]`: which features a sequence model reads, and its blocks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field

from embark.errors import Mistakes, conflict, nearest
from .section import PositiveInt, Section

if TYPE_CHECKING:
    from .run import RunSpec

SEQUENCE_KINDS = ("din", "sasrec", "hstu")
EMBEDDING_SHARDINGS = ("auto", "table_wise", "row_wise", "column_wise")
"""What TorchRec's EmbeddingCollection can be sharded by, as `train.sharding` names it."""


class SequenceSpec(Section):
    """`[model.sequence]`: the features and blocks of `din`, `sasrec` and `hstu`."""

    history: str = Field(default="", max_length=128)
    """Name of the feature that holds the sequence, oldest first; it has `pooling = "none"`."""
    candidate: str = Field(default="", max_length=128)
    """`din`, `hstu`: name of the feature that is ranked, one id per sample, of the history's table. The model predicts
    the label from the history and this."""
    negatives: str = Field(default="", max_length=128)
    """`sasrec`, `hstu`: name of the sequence feature with items to tell the next item from, of the history's table. The
    model predicts each item of the history from those before it."""
    share_negatives: bool = False
    """`sasrec`, `hstu`: whether all samples of the global batch share their negatives, so that few for each are many
    together. If `train.batch_size` is left out, it is 128 at most."""
    exclude_seen: bool = True
    """`sasrec`, `hstu`: the metrics of an evaluation that early stopping takes leave out items that the user had chosen
    before, as candidates and as what is to be found. Both ways are always reported."""
    times: str = Field(default="", max_length=128)
    """`sasrec`, `hstu`: name of the feature with the time of each item of the history in seconds, which has
    `lookup = false`; empty: only the order counts."""
    num_blocks: PositiveInt = Field(default=2, le=1000)
    """`sasrec`, `hstu`: number of attention blocks."""
    num_heads: PositiveInt = Field(default=1, le=1024)
    """`sasrec`, `hstu`: attention heads of a block; they share the width."""

    @property
    def is_next_item(self) -> bool:
        """Whether the model predicts the next item, not a label."""
        return bool(self.negatives)


def sequence_mistakes(spec: RunSpec) -> Mistakes:
    """Find conflicts of sequence features and of the models that read them."""
    model, tables = spec.model, {table.name: table for table in spec.model.tables}
    for index, table in enumerate(model.tables):
        where = f"model.tables.{index}"
        if table.is_sequence and "multi_hot" not in table.model_fields_set:
            yield conflict(f"{where}.max_length", "", "a sequence needs its maximum length", "set max_length")
        if table.max_length not in (None, table.multi_hot):
            yield conflict(f"{where}.multi_hot", table.multi_hot, f"is not max_length = {table.max_length}",
                           "leave multi_hot out")
        for field in ("max_length", "mean_length"):
            if not table.is_sequence and getattr(table, field) is not None:
                yield conflict(f"{where}.{field}", getattr(table, field), f'has no effect while pooling is '
                               f'"{table.pooling}"', 'set pooling = "none", or leave it out')
        if not table.lookup and not table.is_sequence:
            yield conflict(f"{where}.lookup", "false", "numbers are not pooled", 'set pooling = "none"')
        if not table.is_sequence and table.multi_hot > 1 and any(
                other.is_sequence and other.weights == table.weights for other in model.tables):
            yield conflict(f"{where}.multi_hot", table.multi_hot, f"rows of table {table.weights} are looked up one by "
                           "one, for a sequence", 'pooling = "none", or a table of its own')
    if model.kind in SEQUENCE_KINDS:
        if spec.data.kind != "prepared" or model.gives_tables or model.sequence.history:  # else the data says them
            yield from _role_mistakes(spec)
    elif model.sequence != SequenceSpec() and not model.is_custom:
        yield conflict("model.sequence", "", f'has no effect on model.kind = "{model.kind}"', "leave it out")
    if model.has_sequences and model.kind not in (*SEQUENCE_KINDS, "two_tower") and not model.is_custom:
        name = next(name for name, table in tables.items() if table.is_sequence)
        yield conflict("model.tables", name, f'model.kind = "{model.kind}" takes pooled features, not sequences',
                       'pooling = "sum" or "mean", or model.kind = "din", "sasrec", "hstu" or your own')
    if model.has_sequences and spec.train.sharding not in EMBEDDING_SHARDINGS:
        yield conflict("train.sharding", spec.train.sharding, "TorchRec does not shard tables of sequences by it",
                       f"one of: {', '.join(EMBEDDING_SHARDINGS)}")
    if model.has_sequences and model.tasks:
        yield conflict("model.tasks", len(model.tasks), "models of sequences have one task", "leave it out")


def _role_mistakes(spec: RunSpec) -> Mistakes:
    model, roles = spec.model, spec.model.sequence
    tables = {table.name: table for table in model.table_list()}
    allowed = {"din": ("history", "candidate"), "sasrec": ("history", "negatives", "times"),
               "hstu": ("history", "candidate", "negatives", "times")}[model.kind]
    for role in ("history", "candidate", "negatives", "times"):
        name = getattr(roles, role)
        field = f"model.sequence.{role}"
        if name and role not in allowed:
            yield conflict(field, name, f'has no effect on model.kind = "{model.kind}"', "leave it out")
        elif name and name not in tables:
            yield conflict(field, name, "is no feature of model.tables", nearest(name, list(tables)))
        elif name and tables[name].is_sequence == (role == "candidate"):
            yield conflict(field, name, "is a sequence" if role == "candidate" else "is pooled",
                           'leave out pooling = "none"' if role == "candidate" else 'set pooling = "none" there')
        elif name and tables[name].lookup == (role == "times"):
            yield conflict(field, name, "is looked up in a table" if role == "times" else "has no rows",
                           f"set lookup = {'false' if role == 'times' else 'true'} there")
    if not roles.history:
        yield conflict("model.sequence.history", "", f'model.kind = "{model.kind}" reads a sequence',
                       "name the feature that holds it")
    needed = [role for role in ("candidate", "negatives") if role in allowed]
    given = [role for role in needed if getattr(roles, role)]
    if len(given) != 1:
        yield conflict("model.sequence", "", f"needs {' or '.join(needed)}" + (", not both" if given else ""),
                       "candidate: the label is predicted; negatives: the next item")
    history = tables.get(roles.history)
    for role in given:
        other = tables.get(getattr(roles, role))
        if history and other and history.weights != other.weights:
            yield conflict(f"model.sequence.{role}", other.name, f"is of table {other.weights}, and the history of "
                           f"{history.weights}", f'set shares = "{history.weights}" there')
    times = tables.get(roles.times)
    if history and times and times.max_length != history.max_length:
        yield conflict("model.sequence.times", times.name, f"may have {times.max_length} values, and the history "
                       f"{history.max_length}", "give both the same max_length")
    if model.kind != "din" and history and (history.dim or 0) % roles.num_heads:
        yield conflict("model.sequence.num_heads", roles.num_heads, f"does not divide the width {history.dim}",
                       "use a divisor")
    if roles.is_next_item and (others := [t.name for t in tables.values() if t.name not in (
            roles.history, roles.negatives, roles.times)] or (["num_dense"] if model.num_dense else [])):
        yield conflict("model.sequence.negatives", roles.negatives, "a model of the next item reads its sequence only, "
                       f"not {others[0]}", "leave it out" if others[0] != "num_dense" else "set model.num_dense = 0")
