"""A spec and its prepared data agree: the data says what the spec leaves open, and the rest is compared."""

from collections.abc import Iterator

from pydantic import ValidationError

from embark.data.prepared.layout import Layout
from embark.data.prepared.manifest import Manifest
from embark.errors import DataError
from embark.spec.model import ModelSpec, Table
from embark.spec.run import RunSpec


def resolve_from_manifest(spec: RunSpec, manifest: Manifest) -> RunSpec:
    """`spec` with the tables and `num_dense` of its data where it gives none; what it gives must fit."""
    model, layout = spec.model, manifest.layout
    changes: dict[str, object] = {}
    if "num_dense" not in model.model_fields_set:
        changes["num_dense"] = len(layout.dense)
    if not model.gives_tables:
        changes["tables"] = _tables(spec.data.path, layout)
    model = model.model_copy(update=changes)
    if differences := list(_differences(model, layout)):
        raise DataError(
            "\n  ".join([f"{spec.data.path}: the data is not what [model] says", *differences]),
            fix="change [model] so; or leave tables, num_tables, rows_per_table and num_dense out of it, to take "
                "those of the data; or prepare the data again: embark data prepare SPEC",
        )
    return spec.model_copy(update={"model": model})


def _tables(path: str, layout: Layout) -> tuple[Table, ...]:
    try:
        return tuple(Table(name=f.name, rows=f.rows, multi_hot=f.multi_hot) for f in layout.features)
    except ValidationError as error:
        bad = error.errors()[0]
        raise DataError(f"{path}: {bad['input']!r} cannot name a table: {bad['msg']}",
                        fix="rename the column, with letters, digits and underscores, and prepare again") from None


def _differences(model: ModelSpec, layout: Layout) -> Iterator[str]:
    if model.num_dense != len(layout.dense):
        yield f"model.num_dense = {model.num_dense}, and the data has {len(layout.dense)} dense columns"
    features = {feature.name: feature for feature in layout.features}
    tables = model.table_list()
    if missing := [table.name for table in tables if table.name not in features]:
        unused = [name for name in features if name not in {table.name for table in tables}]
        has = f"; it has {_some(unused)} beside the tables" if unused else ""
        yield f"the data has no {_some(missing)}{has}"
    for table in tables:
        feature = features.get(table.name)
        if feature is None:
            continue
        if table.rows < feature.rows:
            yield f"{table.name}: rows = {table.rows:,}, and the data has ids up to {feature.rows - 1:,}"
        if table.multi_hot < feature.multi_hot:
            yield f"{table.name}: multi_hot = {table.multi_hot}, and rows of the data have {feature.multi_hot} ids"


def _some(names: list[str]) -> str:
    more = f" and {len(names) - 8} more" if len(names) > 8 else ""
    return ", ".join(map(repr, names[:8])) + more
