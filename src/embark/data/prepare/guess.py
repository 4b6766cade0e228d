"""What each column of the input is: what the spec says, and where it is silent what the columns look like."""

import json
import shlex
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Literal

from embark.errors import DataError, nearest
from embark.features.schema import KINDS, MADE, TIME_ROWS, LabelColumn, Schema, SparseColumn, TimeColumn, texts
from embark.features.time_formats import common_formats, fits
from embark.features.values import DecimalSign, decimal_sign, meaning_of_format, time_formats
from embark.formatting import shortlist
from embark.spec import DataSpec, FeaturesSpec, RunSpec, Table, label_columns
from embark.spec.features import MAX_NAME, bucket_table_name, table_name
from .inputs import InputFile, Inputs
from .sampling import (
    CRITEO_COLUMNS,
    WORDS,
    Column,
    Judgement,
    Sample,
    find_called,
    holds_numbers,
    is_undecoded,
    is_zero_one,
    judge,
    kind_of,
    list_delimiter_of,
    readable,
    say_encoding,
    take_sample,
)

_MAX_SHOWN = 12
_NO_IDS = ("data.prepare.ignored_columns", "data.dense_columns", "weights_column")
"""Fields that name columns which are no ids."""


def guess_schema(spec: RunSpec, inputs: Inputs, files: Sequence[InputFile]) -> Schema:
    """Guess the roles of the columns from a sample of the input. What cannot be guessed is an error with the lines to
    add."""
    names = {*_labels(spec), *(name for _, name in _named_columns(spec))}
    sample, where = take_sample(spec.data.prepare, names, inputs, files), files[0].uri
    if sample.format == "criteo":
        return _criteo(spec, sample, where)
    _refuse_unknown(spec, sample, where)
    if not spec.model.tasks:
        _check_label(spec, sample, where)
    return _schema(spec, sample, where)


def _labels(spec: RunSpec) -> tuple[str, ...]:
    return label_columns(spec.model.tasks) or (spec.data.label,)


@dataclass(slots=True)
class _Choice:
    """The roles of columns that were determined so far."""

    dense: list[str] = field(default_factory=list)
    sparse: list[tuple[str, Judgement]] = field(default_factory=list)  # Lists too, in the order of the columns.
    ignored: list[str] = field(default_factory=list)
    why: dict[str, str] = field(default_factory=dict)


def _schema(spec: RunSpec, sample: Sample, where: str) -> Schema:
    columns = [column.name for column in sample.columns]
    tables = {_column_of(table.name, columns): table for table in spec.model.tables}
    lists = {*spec.data.prepare.list_columns, *(name for name, table in tables.items() if _is_list(spec, name, table))}
    delimiter = spec.data.prepare.list_delimiter or list_delimiter_of(
        [column for column in sample.columns if column.name not in _labels(spec)], lists)
    choice = _choose(spec, sample, tables, delimiter)
    dense = tuple(spec.data.dense_columns) or tuple(choice.dense)
    has_ids = bool(choice.sparse) or any({*parts} - {"age"} for parts in spec.features.times.values())
    if not has_ids and not dense:
        reasons = "; ".join(f"{name} {why}" for name, why in choice.why.items())
        raise DataError(f"{where}: no column was taken for ids or numbers, and a model needs one: {reasons}",
                        'name them: data.prepare.sparse_columns = ["…"]')
    for column in sample.columns:
        found = dict(choice.sparse).get(column.name)
        if found and found.kind == "text" and (cell := next(filter(is_undecoded, column.cells), "")):
            raise DataError(f"{where}: column {column.name!r} has {readable(cell)!r}, which is not "
                            f"{spec.data.prepare.encoding}", say_encoding(InputFile(where, 0)))
    times = find_times(spec.features, spec.data, sample.columns, where)
    choice.why |= {time.name: f"{choice.why[time.name]}; holds {meaning_of_format(time.format)}" for time in times}
    decimals = find_decimals(spec.features, spec.data, sample.columns, (*dense, *_labels(spec)))
    choice.why |= {name: f"{choice.why[name]}; {sign!r} is its decimal sign" for name, sign in decimals.items()}
    by_name = {name: _sparse(spec, name, judgement, tables.get(name)) for name, judgement in choice.sparse}
    numbers = (*dense, *(f"{time.name}_age" for time in times if "age" in time.features))
    if wrong := [name for name, one in spec.features.columns.items() if one.bucket_table and name not in numbers]:
        raise DataError(f"{where}: features.columns.{wrong[0]}.bucket_table is of a column that holds no numbers",
                        f"leave it out; number columns are {_some(numbers)}")
    made = {column.name: column for column in (
        *_sparse_of_times(times), *_crosses(spec), *_buckets(spec, numbers, auto=not has_ids))}
    if taken := [column.name for column in made.values() if column.name in by_name]:
        raise DataError(f"{where}: column {taken[0]!r} and a table that is made have the same name",
                        "set features.crosses.name to another one, or rename the column")
    by_name |= {name: replace(column, rows=tables[name].rows) if name in tables else column
                for name, column in made.items()}
    order = [name for name in tables if name in by_name] if tables else by_name
    sparse = _with_tables(spec, [by_name[name] for name in order], where)
    _refuse_without_table(made.values(), sparse, where)
    _refuse_mixed(spec, sparse, where)
    sparse = _resolved(spec, sparse, numbers, where)
    sparse += tuple(SparseColumn.of_weights(table) for table in spec.model.tables if table.weights_column)
    schema = Schema(sample.format, _labels(spec)[0], dense, sparse,
                    tuple(columns), tuple(choice.ignored), sample.delimiter, sample.has_header,
                    choice.why, _all_examples(sample), list_delimiter=delimiter, times=times,
                    time_column=spec.data.time_column, labels=LabelColumn.of(spec.model.tasks),
                    is_split_by_time=spec.data.prepare.split == "time", decimals=decimals)
    return _check_dense(spec, schema, where)


def _check_dense(spec: RunSpec, schema: Schema, where: str) -> Schema:
    """Return the schema if it has as many dense columns as [model] says."""
    names = (*schema.dense_names, *schema.statistics_names)
    num_dense, found = len(names), ", ".join(names) or "none"
    if "num_dense" in spec.model.model_fields_set and spec.model.num_dense != num_dense:
        raise DataError(f"{where}: model.num_dense = {spec.model.num_dense}, and the dense columns are: {found}",
                        f"set model.num_dense = {num_dense} or leave it out, or name them in data.dense_columns")
    return schema


def find_times(
    features: FeaturesSpec, data: DataSpec, columns: Iterable[Column], where: str
) -> tuple[TimeColumn, ...]:
    """Find the columns of times that the spec names, each with the format of most of its cells. Other formats are
    found when the rows are read."""
    found = []
    for column in columns:
        if column.name not in (*features.times, data.time_column):
            continue
        parts, said = features.times.get(column.name, ()), features.of(column.name)
        is_typed = column.type == "time"
        format = _time_format_of(column, said.time_format if not is_typed else "", data.prepare.time_unit, where)
        if "hour" in parts and (format == "date" or ("%" in format and "%H" not in format and "%I" not in format)):
            raise DataError(f"{where}: column {column.name!r} holds {meaning_of_format(format)}, which have no hour",
                            f'leave "hour" out of features.columns.{column.name}.parts')
        found.append(TimeColumn(column.name, format, parts, said.time_zone))
    return tuple(found)


def find_time_column(columns: Sequence[Column]) -> str:
    """Return the name of the column with the times of rows; empty if none has any. A column that is called so, but
    whose format is not known, is returned too: a fault is better than another order. `read_time = 35` is no time."""
    timed = [column for column in columns if holds_times(column)]
    called = [column for column in columns if not holds_numbers(column) or column.name.lower() in WORDS["times"]]
    return find_called(timed or called, "times") or next((column.name for column in timed), "")


def holds_times(column: Column) -> bool:
    """Tell whether the cells are times; whole numbers also have to be called so."""
    if column.type == "time":
        return True
    may_be_digits = bool(find_called([column], "times"))
    if not column.cells or column.type in ("list", "nested") or (holds_numbers(column) and not may_be_digits):
        return False
    return time_formats(column.cells).most_common(1)[0][0] is not None or bool(
        common_formats(column.cells, may_be_digits=may_be_digits))


def _time_format_of(column: Column, said: str, unit: Literal["auto", "s", "ms"], where: str) -> str:
    """Return the format that the spec says, or else that of most cells."""
    if said:
        if column.cells and not any(fits(cell, said) for cell in column.cells):
            raise DataError(f"{where}: column {column.name!r} holds {_examples(column)}, and none of its values is "
                            f"written {said}", f"correct features.columns.{column.name}.time_format")
        return said
    formats = time_formats(column.cells, unit)
    if formats and (format := formats.most_common(1)[0][0]):
        return format
    common = common_formats(column.cells, may_be_digits=True)
    if len(common) == 1:
        return common[0]
    fix = f'features.columns.{column.name}.time_format = "%d.%m.%Y %H:%M", as the column is written'
    if common:
        fix = " or ".join(f'time_format = "{format}"' for format in common) + f", in [features.columns.{column.name}]"
    what = f"which may be {' or '.join(common)}" if common else "which are no dates or times that are known"
    raise DataError(f"{where}: column {column.name!r} holds {_examples(column)}, {what}",
                    f'say how it is written: {fix}. For numbers since 1970, data.prepare.time_unit = "s" or "ms"')


def find_decimals(
    features: FeaturesSpec, data: DataSpec, columns: Iterable[Column], names: Collection[str]
) -> dict[str, DecimalSign]:
    """Return the decimal signs of the columns among `names` whose numbers may have commas: as the spec says, else as
    their text has them."""
    found = {column.name: features.of(column.name).decimal or data.prepare.decimal or decimal_sign(column.cells)
             for column in columns if column.name in names and column.type == "text"}
    return {name: sign for name, sign in found.items() if sign}


def _sparse_of_times(times: Sequence[TimeColumn]) -> Iterator[SparseColumn]:
    for column in times:
        for kind in ("hour", "weekday", "day", "month"):
            if kind in column.features:
                yield SparseColumn(f"{table_name(column.name)}_{kind}", kind, rows=TIME_ROWS[kind], column=column.name)


def _refuse_without_table(made: Iterable[SparseColumn], sparse: Sequence[SparseColumn], where: str) -> None:
    """Refuse features made of times for which [model] has no table, or one of too few rows."""
    rows = {(column.source, column.kind): column.rows or 0 for column in sparse}
    if wrong := [f'{{ name = "{column.name}", rows = {column.rows or "…"} }}' for column in made
                 if rows.get((column.source, column.kind), -1) < (column.rows or 0)]:
        raise DataError(f"{where}: [model] has no table, or one of too few rows, for the parts of times, "
                        "buckets or features.crosses",
                        f"add to model.tables: {', '.join(wrong)}; or leave the tables out, so that the data says "
                            "them")


def _refuse_mixed(spec: RunSpec, sparse: Sequence[SparseColumn], where: str) -> None:
    """Refuse features that share a table if a value would have another key in each."""
    columns = {column.name: column for column in sparse}
    for table in spec.model.tables:
        mine, other = columns.get(table.name), columns.get(table.weights)
        if mine and other and mine.kind != other.kind:
            raise DataError(f"{where}: {table.name} shares table {other.name}, and column {mine.source!r} holds "
                            f"{KINDS[mine.kind]}, column {other.source!r} {KINDS[other.kind]}: the same value would "
                            "have two ids", "write both alike, or give each a table of its own")


def _choose(spec: RunSpec, sample: Sample, tables: dict[str, Table], list_delimiter: str) -> _Choice:
    data, prepare, choice = spec.data, spec.data.prepare, _Choice()
    is_sparse_given = bool(prepare.sparse_columns or tables)
    guesses_dense = not data.dense_columns and (
        not (is_sparse_given or prepare.list_columns)
        or ("num_dense" in spec.model.model_fields_set and spec.model.num_dense > 0)
    )
    not_taken = {
        "dense": "not among data.dense_columns" if data.dense_columns else
        "the spec names the sparse columns and no dense one",
        "sparse": "not among " + ("model.tables" if tables else "data.prepare.sparse_columns")
    }
    said = {name: f"is named in {field}" for field, name in _named_columns(spec) if field in _NO_IDS}
    said |= dict.fromkeys(spec.features.times, "is named in features.columns")
    said |= dict.fromkeys(_labels(spec), "is the label")
    if ones := texts(prepare.label_is):
        others = {cell for column in sample.columns if column.name == data.label for cell in column.cells} - {*ones}
        said[data.label] += f": 1 for {_some(ones)}, 0 for {_some(sorted(others)) or 'any other'}"
    by_criteo = _criteo_roles([column.name for column in sample.columns])
    for column in sample.columns:
        name, guessed = column.name, by_criteo.get(column.name) or judge(column, list_delimiter)
        choice.why[name] = guessed.why
        if name in said:
            choice.why[name] = said[name]
            choice.ignored += [name] if name in prepare.ignored_columns else []
        elif role := _named_role(spec, column, tables.get(name), list_delimiter):
            choice.sparse.append((name, role))
            choice.why[name] = role.why
        elif name == data.time_column:
            choice.why[name] = "is data.time_column"
        elif guessed.role == "dense" and guesses_dense:
            choice.dense.append(name)
        elif guessed.role in ("sparse", "list") and not is_sparse_given:
            kind = "hex" if name in prepare.hex_columns else guessed.kind
            choice.sparse.append((name, replace(guessed, kind=kind)))
        else:
            choice.ignored.append(name)
            if guessed.role != "ignored":
                choice.why[name] += f"; {not_taken['dense' if guessed.role == 'dense' else 'sparse']}"
    return choice


def _criteo_roles(names: Collection[str]) -> dict[str, Judgement]:
    """Return the roles of columns named as Criteo's are where files have a header: I1 to I13 and C1 to C26."""
    roles = {f"I{i}": Judgement("dense", "is one of Criteo's 13 integers") for i in range(1, 14)}
    roles |= {f"C{i}": Judgement("sparse", "is one of Criteo's 26 ids", "hex") for i in range(1, 27)}
    return roles if {*roles} <= {*names} else {}


def _named_role(spec: RunSpec, column: Column, table: Table | None, list_delimiter: str) -> Judgement | None:
    """Return the role of a column that the spec calls sparse or a list."""
    prepare, name, features = spec.data.prepare, column.name, spec.features.of(column.name)
    is_list = name in prepare.list_columns or (table is not None and _is_list(spec, name, table))
    if not is_list and name not in prepare.sparse_columns and table is None and not features.is_of_ids:
        return None
    if column.type == "nested":
        raise DataError(f"column {name!r} holds structures, which are not read", "write it as a list of values")
    if features.words:
        return Judgement("list", "is text: features.columns says words = true", "text")
    delimiter = list_delimiter if is_list and column.type == "text" else ""
    kind = "hex" if name in prepare.hex_columns else kind_of(column, delimiter)
    # The file knows better than the spec, which says only that the column is sparse.
    return Judgement("list" if is_list or column.type == "list" else "sparse",
                     f"is table {table.name} of [model]" if table is not None else "is named in "
                     + ("features.columns" if features.is_of_ids else "data.prepare"), kind)


def _is_list(spec: RunSpec, column: str, table: Table) -> bool:
    return table.multi_hot > spec.features.of(column).num_hashes or bool(table.weights_column)


def _sparse(spec: RunSpec, name: str, judgement: Judgement, table: Table | None) -> SparseColumn:
    is_list, features = judgement.role == "list", spec.features.of(name)
    called = table.name if table else table_name(name)
    most = features.max_ids or spec.data.prepare.max_ids
    if table:
        most = max(1, table.multi_hot // features.num_hashes)
    column = SparseColumn(called, judgement.kind, is_list, most if is_list else 1, table.rows if table else None,
                          column="" if called == name else name, is_words=features.words)
    return _with_features(spec, column)


def _with_features(spec: RunSpec, column: SparseColumn) -> SparseColumn:
    """Return the column with what `[features]` says of its ids."""
    features = spec.features.of(column.source)
    return replace(column, rows=column.rows or features.rows, num_hashes=features.num_hashes,
                   min_count=features.min_count or 0, statistics=features.statistics)


def _crosses(spec: RunSpec) -> Iterator[SparseColumn]:
    """Yield the crosses; their parts have the names of the spec."""
    for cross in spec.features.crosses:
        yield SparseColumn(table_name(cross.name or "_x_".join(cross.columns)), "cross", rows=cross.rows,
                           parts=cross.columns, min_count=cross.min_count or 0,
                           buckets=tuple(cross.buckets.get(name, ()) for name in cross.columns))


def _buckets(spec: RunSpec, numbers: Iterable[str], *, auto: bool = False) -> Iterator[SparseColumn]:
    """Yield the tables of quantile buckets; `auto`: whether numbers have one unasked."""
    for name in numbers:
        if spec.features.has_buckets(name, auto=auto):
            yield SparseColumn(bucket_table_name(name), "bucket", rows=spec.features.bucket_rows(name), parts=(name,))


def _resolved(
    spec: RunSpec, sparse: Sequence[SparseColumn], numbers: Sequence[str], where: str
) -> tuple[SparseColumn, ...]:
    """Check what `[features]` says of ids, now that the columns are known, and name the parts of crosses by their
    tables."""
    by_name = {column.source: column.name for column in sparse if column.kind not in (*TIME_ROWS, *MADE)}
    by_name |= {column.name: column.name for column in sparse if column.kind not in MADE}
    lists = {column.name for column in sparse if column.is_list}
    found = []
    for column in sparse:
        if column.kind == "bucket":
            found.append(column)
            continue
        parts = [name if bounds and name in numbers else None if bounds else by_name.get(name)
                 for name, bounds in zip(column.parts, column.buckets, strict=True)]
        for name, part in zip(column.parts, parts, strict=True):
            if part is None or part in lists:
                what = "is a list" if part in lists else "is a number column, and has no buckets" if name in numbers \
                    else "is no number column" if name in by_name else "has no table"
                raise DataError(f"{where}: features.crosses names {name!r}, which {what}",
                                f"name columns of one id a row: {_some(sorted({*by_name.values()} - lists))}; or "
                                    "number columns, with their boundaries in its buckets")
        if column.num_hashes > 1 and column.rows is None:
            raise DataError(f"{where}: features.columns.{column.source}.num_hashes = {column.num_hashes} hashes the "
                            "values, and the rows of its table are not given",
                            f"features.columns.{column.source}.rows = 1000000")
        if column.statistics and column.is_list:
            raise DataError(f"{where}: features.columns.{column.source}.statistics needs one value a row, and the "
                            "column holds lists", "leave it out")
        found.append(replace(column, parts=tuple(filter(None, parts))))
    return tuple(found)


def _with_tables(spec: RunSpec, sparse: list[SparseColumn], where: str) -> tuple[SparseColumn, ...]:
    """Give each column a name of its own, and the rows that `num_tables` and `rows_per_table` say."""
    if spec.model.tables:
        return tuple(sparse)
    if not spec.model.gives_tables:
        return tuple(_unique(sparse))
    return _like_tables(spec.model.table_list(), sparse, where)


def _like_tables(
    tables: Sequence[Table], sparse: Sequence[SparseColumn], where: str
) -> tuple[SparseColumn, ...]:
    """Give each column the rows of the table of its name, or, if not all have one, of the table in its position."""
    if len(tables) != len(sparse):
        names = ", ".join(column.source for column in sparse)
        raise DataError(f"{where}: [model] has {len(tables)} tables, and {len(sparse)} columns were taken for ids: "
                        f"{names}", f"set model.num_tables = {len(sparse)}, or leave the tables out of [model], so "
                        "that the data says them")
    by_name = {column.name: column for column in sparse}
    if all(table.name in by_name for table in tables):
        return tuple(replace(by_name[table.name], rows=table.rows) for table in tables)
    return tuple(_named_column(column, table.name, table.rows) for column, table in zip(sparse, tables, strict=True))


def _named_column(column: SparseColumn, name: str, rows: int | None) -> SparseColumn:
    return replace(column, name=name, rows=rows, column="" if column.source == name else column.source)


def _unique(sparse: Sequence[SparseColumn]) -> Iterator[SparseColumn]:
    taken = {column.name for column in sparse if not column.column}
    for column in sparse:
        name, number = column.name, 2
        while column.column and name in taken:
            name, number = f"{column.name[: MAX_NAME - 8]}_{number}", number + 1
        taken.add(name)
        yield _named_column(column, name, column.rows)


def _criteo(spec: RunSpec, sample: Sample, where: str) -> Schema:
    dense, names = CRITEO_COLUMNS[1:14], CRITEO_COLUMNS[14:]
    data, prepare = spec.data, spec.data.prepare
    is_custom = (
        data.dense_columns not in ((), dense) or prepare.sparse_columns not in ((), names)
        or label_columns(spec.model.tasks) not in ((), ("label",))
        or bool(prepare.list_columns or prepare.ignored_columns or spec.features.times or data.time_column))
    if is_custom:
        raise DataError(f"{where}: is Criteo's, whose columns are all taken: label, int_0 to int_12 and cat_0 to "
                        "cat_25", 'leave the columns out of the spec; or set data.prepare.format = "csv", header = '
                                      "false and column_names to choose among them")
    sparse = (*(_with_features(spec, SparseColumn(name, "hex")) for name in names), *_crosses(spec),
              *_buckets(spec, dense))
    if spec.model.gives_tables:
        order = [column.source for column in sparse]
        found = _like_tables(spec.model.table_list(), sparse, where)
        sparse = tuple(sorted(found, key=lambda column: order.index(column.source)))
    sparse = _resolved(spec, sparse, dense, where)
    why = dict.fromkeys(CRITEO_COLUMNS, "is one of Criteo's 40 fields")
    return _check_dense(spec, Schema("criteo", "label", dense, sparse, CRITEO_COLUMNS, why=why,
                                     examples=_all_examples(sample)), where)


def _named_columns(spec: RunSpec) -> Iterator[tuple[str, str]]:
    """Yield where the spec names a column, and the name; all but the label."""
    data, prepare = spec.data, spec.data.prepare
    for where, names in (
        ("data.dense_columns", data.dense_columns), ("data.prepare.sparse_columns", prepare.sparse_columns),
        ("data.prepare.list_columns", prepare.list_columns), ("data.prepare.hex_columns", prepare.hex_columns),
        ("data.prepare.ignored_columns", prepare.ignored_columns),
        ("data.time_column", (data.time_column,) if data.time_column else ()),
        ("features.columns", tuple(spec.features.columns)),
        ("model.tables", tuple(table.name for table in spec.model.tables)),
        ("weights_column", tuple(table.weights_column for table in spec.model.tables if table.weights_column)),
        ("model.tasks", label_columns(spec.model.tasks))
    ):
        yield from ((where, name) for name in names)


def _column_of(table: str, columns: Sequence[str]) -> str:
    """Return the column that a table of the spec means."""
    return next((name for name in columns if table in (name, table_name(name))), table)


def _refuse_unknown(spec: RunSpec, sample: Sample, where: str) -> None:
    columns = [column.name for column in sample.columns]
    made = {f"{table_name(name)}_{kind}" for name, kinds in spec.features.times.items() for kind in kinds}
    made |= {*map(bucket_table_name, columns), *(cross.name for cross in _crosses(spec))}
    wrong = [f"{named} names {name!r}: {nearest(name, columns)}" for named, name in _named_columns(spec)
             if (_column_of(name, columns) if named == "model.tables" else name) not in columns
             and not (named == "model.tables" and name in made)]
    if wrong:
        raise DataError(f"{where}: " + "\n  ".join(["the spec names columns that are not there", *wrong]),
                        _columns_fix(sample, columns))


def _check_label(spec: RunSpec, sample: Sample, where: str) -> None:
    label, above = spec.data.label, spec.data.prepare.label_above
    columns = {column.name: column for column in sample.columns}
    found = columns.get(label)
    if found is None:
        candidates = [column.name for column in sample.columns if is_zero_one(column)]
        which = "these hold 0 and 1: " + ", ".join(candidates) if candidates else "no column holds just 0 and 1"
        named = f"data.label={shlex.quote(candidates[0])}" if candidates else \
            "data.label=COLUMN --set data.prepare.label_above=3, for 1 where the column is larger"
        if all(find_called(sample.columns, what) for what in ("users", "items")):
            which += '. It may be a log of what users chose, for model.kind = "sasrec"'
        raise DataError(f"{where}: has no column {label!r}, which data.label names; {which}",
                        f"{_columns_fix(sample, list(columns))}; say which is the label, in the spec or with --set "
                            f"{named}")
    _check_label_values(found, above, texts(spec.data.prepare.label_is), where)


def _check_label_values(label: Column, above: float | None, ones: tuple[str, ...], where: str) -> None:
    """Refuse a label of other values than 0 and 1 about which the spec is silent, or of which it names none."""
    counts = Counter(label.cells).most_common()
    values = sorted(value for value, _ in counts)
    if ones and (len(values) < 2 or set(values) & set(ones)):
        return
    if not ones and (above is not None or is_zero_one(label)):
        return
    fix = "name a column of numbers in data.label"
    with suppress(ValueError, IndexError):  # it has words, or no value at all
        middle = sorted(map(float, values))[(len(values) - 1) // 2]
        fix = f"say what makes a 1, in the spec or with --set data.prepare.label_above={middle:g}"
    if ones or (len(values) == 2 and "label_above" not in fix):
        rarer = json.dumps(readable(counts[-1][0]), ensure_ascii=False)
        fix = f"say what makes a 1, in [data.prepare] of the spec: label_is = {rarer}"
    named = f"data.prepare.label_is is {_some(ones)}, and column {label.name!r} holds" if ones else \
        f"data.label is {label.name!r}, which holds"
    raise DataError(f"{where}: {named} {_some(values) or 'no value'}" + ("" if ones else " and not 0 and 1"), fix)


def _columns_fix(sample: Sample, columns: Sequence[str]) -> str:
    has = f"the columns are: {_some(columns)}"
    if sample.format == "csv" and not sample.has_header:
        return (f"{has}; the file was taken to have no header: data.prepare.column_names names them, "
                "data.prepare.header = true says that the first line does")
    return has


def _all_examples(sample: Sample) -> dict[str, str]:
    return {column.name: _examples(column) for column in sample.columns}


def _examples(column: Column) -> str:
    return _some(list(dict.fromkeys(column.cells))[:3], limit=3) or "nothing"


def _some(values: Sequence[str], limit: int = _MAX_SHOWN) -> str:
    shown = map(readable, values)
    return shortlist([value if len(value) <= 24 else value[:24] + "…" for value in shown], limit)
