"""What a prepared data set is: written last, so that a directory without it is not one."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, Field, ValidationError

from embark.errors import DataError, UserError
from embark.features.layout import Feature, Layout
from embark.formatting import shortlist
from embark.spec import ModelSpec, RunSpec, Table, label_columns, with_train_defaults
from embark.store import normalize_path
from embark.values import JsonDict, JsonMap, frozen

MANIFEST = "manifest.json"
IDS = "ids"  # Folder of the maps from keys to ids, beside the data.
EARLIER = "id_map_from"  # A key of the settings: the fingerprint of the data whose ids were kept.
NUMBERS = "numbers"  # A key of the settings: the state of the transforms of numbers.
TIME_SPLIT = "time_split"  # A key of the settings: the column of a split by time, and where validation and test begin.
TABLES = "tables"  # A key of the settings: the versions of the Delta and Iceberg tables that it was made of.
SHARED = "shared_tables"  # A key of the settings: features that look up the table of another one.
SEQUENCES = "sequences"  # A key of the settings: what the rows of a prepared log are, each of them a user's.
VERSION = 1
TASKS_VERSION = 2  # Has labels of several tasks, which earlier versions of Embark cannot read.
WEIGHTS_VERSION = 3  # Has weights of ids.
SEQUENCES_VERSION = 4  # Has users with all of their items.
BLOCK_ROWS = 32_768
Split = Literal["train", "validation", "test"]
SPLITS: tuple[Split, ...] = ("train", "validation", "test")
HELD_OUT_ENDS = ("train_items", "validation_items", "test_items")
"""Features of a user: how many items are for training, and how many there are up to a held-out one, itself included."""
LOG_SPLITS: tuple[Split, ...] = ("train", "validation")
"""Where the users of a log are: those to train on, and those who are only evaluated."""
MIN_HELD_OUT = 3  # Users with fewer items are trained on, and not evaluated, unless the split is by time.


@frozen
class Part:
    """A file of blocks of `block_rows` rows one after the other, the last with what is left."""

    file: str  # Relative to the manifest.
    rows: int
    size_bytes: int
    sha256: str
    block_starts: Sequence[int] = ()
    """Byte each block begins at, where a feature is ragged; else all have the size that the layout gives."""


@dataclass(frozen=True)
class Manifest:
    """The schema, the files and where they came from."""

    layout: Layout
    parts: Mapping[Split, tuple[Part, ...]]
    label: str = "label"
    block_rows: int = BLOCK_ROWS
    settings: JsonDict = field(default_factory=dict)  # Settings of the preparation.
    sources: tuple[JsonDict, ...] = ()  # The files it was made of, with their sizes.
    bad_rows: JsonDict = field(default_factory=dict)  # Number of rows that were left out, by reason.

    @property
    def id_features(self) -> tuple[Feature, ...]:
        """The features whose values have ids: of a log, its items."""
        return self.layout.features[:1] if SEQUENCES in self.settings else self.layout.id_features

    def num_rows(self, split: Split) -> int:
        return sum(part.rows for part in self.parts.get(split, ()))

    @property
    def rows_by_split(self) -> dict[str, int]:
        """How many samples each split has."""
        if SEQUENCES in self.settings:
            held_out = self.settings[SEQUENCES]["held_out"].values()
            return {"train": self.num_rows("train"), "validation": sum(nums[0] for nums in held_out),
                    "test": sum(nums[1] for nums in held_out)}
        return {split: self.num_rows(split) for split in SPLITS}

    def all_parts(self) -> Iterator[Part]:
        """Yield the parts of every split."""
        for split in SPLITS:
            yield from self.parts.get(split, ())

    @property
    def size_bytes(self) -> int:
        return sum(part.size_bytes for part in self.all_parts())

    @property
    def time_split(self) -> dict[str, str]:
        """The column that the rows were split by, and where validation and test begin; empty if not split by time."""
        return dict(self.settings.get(TIME_SPLIT) or {})

    def fingerprint(self) -> str:
        """Return a checksum of what the rows are: the columns, every split's parts by their checksums, where a split by
        time begins, and the id maps.

        Where the files lie and what they were made of is no part of it, but for the versions of tables.
        """
        parts = {split: [[p.rows, p.sha256] for p in self.parts.get(split, ())] for split in SPLITS}
        value = {"layout": self.layout.to_json(), "block_rows": self.block_rows, "parts": parts,
                 "id_maps": self.settings.get("id_maps")}
        if self.time_split:
            value[TIME_SPLIT] = self.time_split
        if NUMBERS in self.settings:
            value[NUMBERS] = self.settings[NUMBERS]
        versions = self.settings.get(TABLES, ())
        if versions:
            value[TABLES] = [[one["id"], one["version"]] for one in versions]
        return versioned(hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest(),
                         [f"{one['kind']} {one['version']}" for one in versions])

    def to_text(self) -> str:
        """Return the content of the file."""
        parts = {split: [{"file": p.file, "rows": p.rows, "bytes": p.size_bytes, "sha256": p.sha256}
                         | ({"block_starts": list(p.block_starts)} if p.block_starts else {})
                         for p in self.parts.get(split, ())] for split in SPLITS}
        layout = self.layout
        version = WEIGHTS_VERSION if layout.id_features != layout.features else TASKS_VERSION if layout.labels else \
            SEQUENCES_VERSION if SEQUENCES in self.settings else VERSION
        value = {
            "format": "embark-prepared", "version": version,
            "label": self.label, "block_rows": self.block_rows,
            "rows": self.rows_by_split, "layout": self.layout.to_json(),
            "settings": self.settings, "sources": list(self.sources), "bad_rows": self.bad_rows,
            "parts": parts
        }
        return json.dumps(value, indent=1) + "\n"

    @staticmethod
    def from_text(text: str, where: str) -> Manifest:
        """Read a manifest, or say what the text is instead."""
        try:
            head = _Head.model_validate_json(text)
            if not VERSION <= head.version <= SEQUENCES_VERSION:
                raise DataError(f"{where}: its format is version {head.version}, this Embark reads up to "
                                f"{SEQUENCES_VERSION}",
                                "prepare the data again, or use the Embark that wrote it")
            file = _File.model_validate_json(text)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            reason = f"{'.'.join(map(str, first['loc']))}: {first['msg']}".removeprefix(": ")
            raise DataError(f"{where}: not the manifest of prepared data ({reason})",
                            "`embark data prepare` writes one") from None
        parts = {split: tuple(Part(p.file, p.rows, p.bytes, p.sha256, p.block_starts)
                              for p in file.parts.get(split, ())) for split in SPLITS}
        return Manifest(file.layout, parts, file.label, file.block_rows, file.settings, file.sources,
                        file.bad_rows)


def versioned(checksum: str, versions: Sequence[str]) -> str:
    """Return a fingerprint of rows that names the versions of the tables they come from."""
    return f"{checksum} ({', '.join(versions)})" if versions else checksum


def _inside(path: str) -> str:
    try:
        return normalize_path(path)
    except UserError as error:
        raise ValueError(error.what) from None


Size = Annotated[int, Field(ge=0, lt=1 << 62)]


class _Head(BaseModel, strict=True):
    format: Literal["embark-prepared"]
    version: int


class _PartEntry(BaseModel, strict=True):
    file: Annotated[str, AfterValidator(_inside)]
    rows: Size
    bytes: Size
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]  # Names the part's file in the cache.
    block_starts: tuple[Size, ...] = ()


class _File(_Head, strict=True):
    label: str
    block_rows: Annotated[int, Field(ge=1, lt=1 << 31)]
    layout: Layout
    parts: dict[Split, tuple[_PartEntry, ...]]
    settings: JsonDict
    sources: tuple[JsonDict, ...]
    bad_rows: JsonDict


def resolve_from_manifest(spec: RunSpec, manifest: Manifest) -> RunSpec:
    """Return `spec` with the tables and `num_dense` of its data where it gives none, and the fields of `[train]` that
    follow the number of training rows. What the spec gives must fit the data."""
    model, layout = spec.model, manifest.layout
    if SEQUENCES in manifest.settings:
        return with_train_defaults(spec.changed(model=_model_of_log(spec, manifest)),
                                   manifest.num_rows("train"), manifest.rows_by_split[spec.data.eval_split])
    changes: dict[str, object] = {}
    if "num_dense" not in model.model_fields_set:
        changes["num_dense"] = len(layout.dense)
    if not model.gives_tables:
        changes["tables"] = _tables(spec.data.path, layout)
    model = model.model_copy(update=changes)
    if differences := [*_differences(model, layout), *_sharing_differences(model, manifest.settings),
                       *_label_differences(model, manifest)]:
        raise DataError(
            "\n  ".join([f"{spec.data.path}: the data is not what [model] says", *differences]),
            "change [model] so; or leave tables, num_tables, rows_per_table and num_dense out of it, to take "
                "those of the data; or prepare the data again: embark data prepare SPEC"
        )
    return with_train_defaults(spec.changed(model=model), manifest.num_rows("train"),
                               manifest.num_rows(spec.data.eval_split))


def _model_of_log(spec: RunSpec, manifest: Manifest) -> ModelSpec:
    """Return the model with the history, the negatives and the times of a prepared log, where it has no tables."""
    model, how, about = spec.model, spec.data.interactions, manifest.settings[SEQUENCES]
    item, *more = (feature for feature in manifest.layout.features if feature.is_ragged)
    roles = model.sequence
    times = [one.name for one in more]
    if roles.times and not times:
        raise DataError(f"{spec.data.path}: the log was prepared without times, and model.sequence.times names them",
                        "leave it out, or prepare the log again with data.time_column")
    if not model.gives_tables:
        longest = how.max_length + 1
        mean = min(float(longest), about["trained"] / max(1, manifest.num_rows("train")))
        roles = roles.model_copy(update={"history": roles.history or item.name, **(
            {"negatives": roles.negatives or "negatives"} if not roles.candidate else {})})
        history = {"pooling": "none", "multi_hot": longest, "max_length": longest, "mean_length": mean}
        found = [Table(name=roles.history, rows=item.rows, **history),
                 Table(name=roles.negatives, rows=item.rows, shares=roles.history, pooling="none",
                       multi_hot=how.num_negatives, max_length=how.num_negatives)]
        if roles.times:
            found.append(Table(name=roles.times, rows=1, lookup=False, **history))
        return model.changed(tables=tuple(found), sequence=roles,
                             num_dense=model.num_dense if "num_dense" in model.model_fields_set else 0)
    for table in model.table_list():
        if table.name == roles.history and table.rows < item.rows:
            raise DataError(f"{spec.data.path}: {table.name}: rows = {table.rows:,}, and the log has items up to row "
                            f"{item.rows - 1:,}", f"{table.name}: rows = {item.rows}; or leave the tables out, to "
                            "take those of the data")
    return model


def _tables(path: str, layout: Layout) -> tuple[Table, ...]:
    try:
        return tuple(Table(name=f.name, rows=f.rows) if f.multi_hot == 1 else
                     Table(name=f.name, rows=f.rows, multi_hot=f.multi_hot) for f in layout.id_features)
    except ValidationError as error:
        bad = error.errors()[0]
        raise DataError(f"{path}: {bad['input']!r} cannot name a table: {bad['msg']}",
                        "rename the column, with letters, digits and underscores, and prepare again") from None


def _differences(model: ModelSpec, layout: Layout) -> Iterator[str]:
    if model.num_dense != len(layout.dense):
        yield f"model.num_dense = {model.num_dense}, and the data has {len(layout.dense)} dense columns"
    features = {feature.name: feature for feature in layout.features}
    tables = model.table_list()
    if missing := [table.name for table in tables if table.name not in features]:
        unused = [feature.name for feature in layout.id_features if feature.name not in {t.name for t in tables}]
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
        if table.weights_column and table.weights_feature not in features:
            yield f"{table.name}: weights_column = {table.weights_column!r}, and the data has no such weights"


def shared_tables(model: ModelSpec) -> dict[str, str]:
    """Return the features that look up the table of another one, and its name."""
    return {table.name: table.shares for table in model.tables if table.shares}


def _sharing_differences(model: ModelSpec, settings: JsonMap) -> Iterator[str]:
    """Yield features that share a table although the data was not prepared so: the same value has another id in
    each."""
    maps, schema = settings.get("id_maps") or {}, settings.get("schema") or {}
    kinds = {column.get("name"): column.get("kind") for column in schema.get("sparse", ())}
    for feature, table in shared_tables(model).items():
        mine, other = ((kinds.get(name), about.get("how"), about.get("sha256") or about.get("rows"))
                       for name in (feature, table) for about in [maps.get(name, {})])
        if mine != other:
            yield f"{feature}: shares table {table}, and the data has other ids for the same values"


def _label_differences(model: ModelSpec, manifest: Manifest) -> Iterator[str]:
    has = label_columns_of(manifest)
    if missing := [name for name in label_columns(model.tasks) if name not in has]:
        yield f"the data has no label {_some(missing)}; it has {_some(list(has))}"


def label_columns_of(manifest: Manifest) -> tuple[str, ...]:
    """Return the columns that can be labels of tasks."""
    return manifest.layout.labels or (manifest.label,)


def _some(names: list[str]) -> str:
    return shortlist([repr(name) for name in names], 8)
