"""An exported model: numbered versions in a folder or an object store, each committed complete or invisible.

    version-000000001/artifact.json          what it is, and how a raw row becomes ids
    version-000000001/weights.safetensors    the dense network and the tables
    version-000000001/id_maps.safetensors    the key of each value of a column and its id, by rising key; of
                                             a dynamic table by slot
    version-000000001/items.safetensors      of a retrieval model: its items, their values, the index that searches them
    version-000000001/reference.json         what it was evaluated on: bins of each column's values, of the scores
    version-000000001/commit.json            the mark: every file with its size and checksum
    version-000000001/gate.json              the gate's verdict on a version that was written to be published
    current.json                             the version that is scored and served with
    numbers.json                             the highest number that a version ever had

A version may be a delta: instead of weights and id maps it has `delta.safetensors`, what changed since its parent.
What a version is, its identity says, a checksum of its content: where all of a folder was deleted, numbers are given
again.

Opening one reads arrays and JSON, so that nothing in it can run code. `FORMAT_VERSION` changes too when the same cell
becomes another key, as it would with another hash.
"""

import fcntl
import hashlib
import json
import logging
import os
import re
import shutil
import time
from collections.abc import Collection, Sequence
from contextlib import ExitStack, suppress
from copy import copy
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    TypeAdapter,
    ValidationError,
    model_serializer,
    model_validator,
)

from embark.data.prepared import Layout
from embark.errors import DataError, EmbarkError, Fault, UserError
from embark.features.arrays import Array
from embark.features.encoding import IdMap, RowEncoder, by_rising_key, same_lengths_of
from embark.features.numbers import NumberCode, Numbers, recorded_numbers
from embark.features.schema import Schema
from embark.features.statistics import ValueStatistics, are_statistics, statistic_columns
from embark.spec import FeaturesSpec, ModelSpec, PrepareSpec, file_of
from embark.spec.features import LEGACY_OPTIONS, legacy_features
from embark.store import SPEC, Checkpoint, CheckpointStore, FileChecksum, NotFound, checkpoint_name, open_store
from embark.store.atomic_file import NO_LOCKS, make_directory
from embark.store.checkpoint_store import COMMIT_FILE
from embark.values import JsonDict, JsonMap, frozen
from .delta import (
    DELTA,
    PARENT,
    PARENT_ID_MAPS,
    PARENT_IDENTITY,
    PARENT_WEIGHTS,
    TENSOR_FILES,
    apply_delta,
    identity_of,
    tensors_checksum,
)
from .quantize import TableDtype
from .reference import REFERENCE, Reference
from .safetensors_file import map_file

FORMAT_VERSION: Literal[1] = 1
INFO, WEIGHTS, ID_MAPS, ITEMS = "artifact.json", "weights.safetensors", "id_maps.safetensors", "items.safetensors"
CURRENT, GATE = "current.json", "gate.json"
_OTHER = "choose another version with --version or `embark rollback`, or export the run again"
CANDIDATE = "candidate"  # Set in a commit record: the version becomes current only when `current.json` names it.
_log = logging.getLogger("embark.export")
DENSE = "dense."  # Prefix of the names of the dense network's weights.


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class RowFormat(_Section):
    """Everything that turns a raw row into ids and numbers."""

    columns: Schema
    prepare: PrepareSpec
    layout: Layout
    hashed_rows: dict[str, int]  # The modulus, by table, of values without an entry in the map; with 0 they have id 0.
    plain_ids: Literal["refuse", "clip"] | None = None  # Treatment of ids beyond their table, if rows contain ids.
    features: FeaturesSpec = FeaturesSpec()
    numbers: tuple[NumberCode, ...] | None = None  # None: a transform without a state, which `features` names.

    def coded_numbers(self) -> Numbers:
        """Return how numbers become dense values."""
        if self.numbers is None:
            return recorded_numbers(None, self.features, self.columns.dense_names)
        return Numbers(self.numbers)

    @model_validator(mode="before")
    @classmethod
    def _with_legacy_features(cls, values: Any) -> Any:
        """Read the transform of numbers where artifacts had it before there was `[features]`."""
        prepare = values.get("prepare") if isinstance(values, dict) else None
        if isinstance(prepare, dict) and {*LEGACY_OPTIONS} & {*prepare}:
            rest = {key: value for key, value in prepare.items() if key not in LEGACY_OPTIONS}
            return {"features": legacy_features(prepare), **values, "prepare": rest}
        return values

    @model_serializer(mode="wrap")
    def _without_labels(self, dump: SerializerFunctionWrapHandler) -> JsonDict:
        """Leave labels out: rows to score have none, and the file stays as it was before there were several labels."""
        values: JsonDict = dump(self)
        for part in ("columns", "layout"):
            values[part] = {key: value for key, value in values[part].items() if key != "labels"}
        for part in ("features", "numbers"):
            if not values[part]:
                del values[part]
        return values


class ItemIndexInfo(_Section):
    """Describes the index of a retrieval model's items."""

    num_items: int
    kind: str  # `exact`, or `hnsw` with its width of search.
    k: int
    recall: float  # The share of an exact search's first `k` items that it finds, a mean over the queries.
    num_queries: int  # Users of held-out samples.


class ArtifactInfo(_Section):
    """The contents of `artifact.json`: what a version is."""

    format: Literal["embark-artifact"] = "embark-artifact"
    format_version: Literal[1] = FORMAT_VERSION
    embark: str
    run: str
    step: int
    tables: TableDtype
    model: ModelSpec
    code_sha256: str = ""  # Checksum of a custom model's file; an artifact does not hold its text.
    rows: RowFormat
    item_index: ItemIndexInfo | None = None
    metrics: dict[str, float] = {}  # Results of the run's last evaluation before the checkpoint.


def code_digest(code: str) -> str:
    """Return the checksum of the text of a custom model's file."""
    return hashlib.sha256(code.encode()).hexdigest()


@dataclass(frozen=True)
class Artifact:
    """A version whose files are on this machine and match their checksums."""

    uri: str
    version: int
    folder: Path
    info: ArtifactInfo
    num_bytes: int
    deltas: tuple[Path, ...] = ()  # Folders of the deltas since the full version, its own last.
    base: Path | None = None  # The folder of the full version, if this is a delta.
    identities: tuple[str, ...] = ()  # Those of the full version and of the deltas since; empty once it is changed.

    @property
    def identity(self) -> str:
        """The checksum of its content; empty once a delta was written into its arrays."""
        return self.identities[-1] if self.identities else ""

    @property
    def folders(self) -> tuple[Path, ...]:
        """The folders that hold its files: the full version first, then its deltas."""
        return (self.base or self.folder, *self.deltas)

    @cached_property
    def weights(self) -> dict[str, Array]:
        """The weights by name, mapped from the file; rows that a delta changed are in memory."""
        return self._tensors(WEIGHTS)

    @cached_property
    def id_maps(self) -> dict[str, Array]:
        """The arrays of the id maps by name, mapped from the file."""
        return self._tensors(ID_MAPS)

    def _tensors(self, file: str) -> dict[str, Array]:
        found = map_file((self.base or self.folder) / file)
        for folder in self.deltas:
            found = apply_delta(file, found, map_file(folder / DELTA), str(folder))
        return found

    @cached_property
    def items(self) -> dict[str, Array]:
        """The arrays of a retrieval model's items by name, mapped from the file."""
        return map_file(self.folder / ITEMS)

    @cached_property
    def reference(self) -> Reference:
        """The statistics that requests are compared with."""
        path = self.folder / REFERENCE
        if not path.exists():
            return Reference(why_none="the artifact was exported by an earlier Embark, which wrote no reference")
        try:
            return Reference.model_validate_json(path.read_bytes())
        except ValidationError:
            return Reference(why_none="the artifact was exported by a later Embark, whose reference has another form")

    def model_with_code(self, model_file: str) -> ModelSpec:
        """Return the model; a custom one with the code of a file that the operator names, which must be the file it was
        trained with. Only that file is ever run."""
        model = self.info.model
        if not model.is_custom:
            if model_file:
                raise UserError(f"--model-file: the model is {model.kind}, which needs no file", "leave it out")
            return model
        fix = f"--model-file {file_of(model.kind)}: the file that the run was trained with"
        if not model_file:
            raise UserError(f"{self.uri}: its model is {model.kind}, and an artifact holds no code", fix)
        try:
            code = Path(model_file).read_text(encoding="utf-8-sig")
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"{model_file}: cannot be read: {getattr(error, 'strerror', None) or error}",
                            fix) from None
        if code_digest(code) != self.info.code_sha256:
            where = f"{self.info.run}/checkpoints/{checkpoint_name(self.info.step)}/{SPEC}"
            raise UserError(f"{model_file}: is not the code that the model was trained with",
                            f"put back that text: it is model.code in {where}")
        return model.changed(code=code)

    @cached_property
    def encoder(self) -> RowEncoder:
        """The encoder that turns raw rows into what the model takes."""
        rows, arrays = self.info.rows, self.id_maps
        columns = {column.name: column for column in rows.columns.sparse}
        model = self.info.model
        dynamic = [table.name for table in model.tables if table.is_dynamic]
        both = {name: (arrays.get(f"{name}.keys"), arrays.get(f"{name}.ids")) for name in columns}
        both |= {name: by_rising_key(arrays[f"{name}.keys"], arrays[f"{name}.ids"]) for name in dynamic}
        maps = tuple(IdMap(columns[feature.name], feature, *both[feature.name], rows.hashed_rows[feature.name])
                     for feature in rows.layout.features)
        statistics = tuple(
            ValueStatistics(position, arrays[f"{column.name}.statistics.keys"], arrays[f"{column.name}.statistics"])
            for position, column in statistic_columns(rows.columns).items())
        return RowEncoder(rows.coded_numbers(), rows.layout, maps, rows.plain_ids,
                          model.features_of_any_number, same_lengths_of(model), statistics)


def open_versions(uri: str) -> CheckpointStore:
    """Open the versions at a URI."""
    return CheckpointStore(open_store(uri.rstrip("/") or uri), kind="version")


class VersionId(NamedTuple):
    """A version: its number, and its content."""

    version: int
    identity: str
    chain: tuple[Checkpoint, ...] = ()  # Once it is fetched: the full version that it goes back to, and the deltas.


@frozen
class CurrentVersion:
    """The version that is scored and served with, and how it came to be."""

    version: Annotated[int, Field(strict=True)]  # 0 if there is none.
    identity: str = ""  # Its content when it was made current; empty if that is not known.
    serial: int = 0  # Rises with each change; 0 without `current.json`, or if it was not written by Embark.
    reason: str = ""  # What made it current: `export`, `publish` or `rollback`.
    previous: int = 0
    time_s: float = 0.0
    text: bytes | None = field(default=None, compare=False, repr=False)  # The file's bytes; None without a file.


_CURRENT = TypeAdapter(CurrentVersion)


class CurrentChanged(Fault):
    """Another process made a version current since a decision was made."""

    def __init__(self, uri: str, now: CurrentVersion) -> None:
        by = f" by `embark {now.reason}`" if now.reason else ""
        super().__init__(f"{uri}: version {now.version} was made current{by} meanwhile", fix="start again")
        self.now = now


def current(versions: CheckpointStore) -> CurrentVersion:
    """Return the version that `current.json` names; without this file the newest one."""
    found, text = _read_current(versions)
    if found is None and text is not None:
        uri = versions.store.uri
        raise DataError(f"{versions.store.where(CURRENT)} is damaged: it names no version",
                        f"`embark rollback {uri} VERSION` writes it again; --list lists the versions")
    if found is None:
        found = CurrentVersion(max((0, *(one.step for one in versions.committed() if not one.values.get(CANDIDATE)),
                                    *versions.unreadable())))
    return found if found.identity else replace(found, identity=_identity_at(versions, found.version))


def current_version(versions: CheckpointStore) -> int:
    """Return the number of the current version, or 0 if there is none."""
    return current(versions).version


def set_current(
    versions: CheckpointStore, version: int, *, reason: str = "", expected: CurrentVersion | None = None
) -> CurrentVersion:
    """Score and serve with this version from now on. Readers see the old one or the new one. With `expected`, what was
    current when this was decided, `CurrentChanged` is raised if something else is now."""
    identity = _identity_at(versions, version)
    while True:
        before, text = (expected, expected.text) if expected else _read_current(versions)
        new = CurrentVersion(version, identity, before.serial + 1 if before else 1, reason,
                             before.version if before else 0, round(time.time(), 3))
        written = _CURRENT.dump_json(new, exclude={"text"}) + b"\n"
        if versions.store.create(CURRENT, written) if text is None else versions.store.replace(CURRENT, written, text):
            return replace(new, text=written)
        if expected:
            raise CurrentChanged(versions.store.uri, current(versions))


def _read_current(versions: CheckpointStore) -> tuple[CurrentVersion | None, bytes | None]:
    """Return what `current.json` says, None if it is damaged or absent, and its bytes."""
    try:
        text = versions.store.read(CURRENT)
        return replace(_CURRENT.validate_json(text), text=text), text
    except NotFound:
        return None, None
    except ValidationError:
        return None, text


def _identity_at(versions: CheckpointStore, version: int) -> str:
    found = versions.find(version)
    return identity_of(found) if found else ""


def read_gate(versions: CheckpointStore, version: int) -> JsonDict | None:
    """Return the gate's verdict on a version that was written to be published, or None if there is none yet."""
    try:
        found = json.loads(versions.store.read(f"{checkpoint_name(version, 'version')}/{GATE}"))
        if isinstance(found, dict) and isinstance(found.get("passed"), bool) and isinstance(found.get("why"), str):
            return found
        return None
    except (NotFound, ValueError, RecursionError):
        return None


def write_gate(versions: CheckpointStore, version: int, record: JsonMap) -> None:
    """Write the gate's verdict beside a version, completely or not at all."""
    text = json.dumps({**record, "time_s": round(time.time(), 3)}, indent=1) + "\n"
    versions.store.write(f"{checkpoint_name(version, 'version')}/{GATE}", text.encode())


def open_artifact(
    uri: str, version: int | VersionId | None = None, onto: Artifact | None = None, *, identity: str = ""
) -> Artifact:
    """Open the current version at `uri`, or the given one, after checking its files; from an object store through a
    folder of the user's cache. With `identity` it must have that content. If it has the content of `onto`, or is a
    delta of that, directly or through other deltas, the deltas are written into the arrays of `onto`, which must not be
    used any more. What `fetch_version` returned is opened from there, without a look at `uri`."""
    uri, is_fetched = uri.rstrip("/") or uri, isinstance(version, VersionId) and bool(version.chain)
    versions, chain = _chain(uri, version, identity, onto.identity if onto else "")
    if onto and identity_of(chain[0]) == onto.identity:
        found = _advanced(uri, versions, chain, onto, is_fetched=is_fetched)
    else:
        folders = _folders(versions, chain, is_fetched=is_fetched)
        found = Artifact(uri, chain[-1].step, folders[-1], _read_info(folders[-1] / INFO), chain[-1].num_bytes,
                         deltas=tuple(folders[1:]), base=folders[0] if len(folders) > 1 else None,
                         identities=tuple(identity_of(one) for one in chain))
        _check_tensors(found, versions, chain)
    _check_ids(found)
    return found


def open_features(folder: str) -> Artifact:
    """Open how raw rows are encoded, beside a model that `embark export --format` wrote; it has no weights."""
    path = Path(folder)
    if not (path / INFO).is_file():
        raise UserError(f"{folder}: has no {INFO}", "name a folder that `embark export RUN --format` wrote")
    found = Artifact(folder, 0, path, _read_info(path / INFO), 0)
    _check_ids(found)
    return found


def fetch_version(uri: str, version: int | VersionId | None = None, have: str = "") -> VersionId:
    """Copy the files of the current version, or of the given one, into the user's cache, unless they are there, and
    check the copies. Files that the version with the identity `have` consists of too are skipped.

    A server maps its tables: a file that was shortened at `uri` would end it, and one that was written over would
    change its answers. A copy on disk may be larger than memory, unlike one there, and all workers share its pages.
    """
    versions, chain = _chain(uri, version, "", have)
    for one in chain[1:] if identity_of(chain[0]) == have and len(chain) > 1 else chain:
        with suppress(OSError):  # the disk is full or read-only, or has no locks
            _hold(_copy_folder(versions, one).parent)
        _fetch(versions, one)
    return VersionId(chain[-1].step, identity_of(chain[-1]), tuple(chain))


def _chain(uri: str, version: int | VersionId | None, identity: str, until: str
           ) -> tuple[CheckpointStore, Sequence[Checkpoint]]:
    """Return the versions at a URI, and the delta chain of the chosen one."""
    versions, named_by = open_versions(uri), ""
    if isinstance(version, VersionId):
        if version.chain:
            found = [number for number, one in enumerate(version.chain) if identity_of(one) == until]
            return versions, version.chain[found[0] if found else 0 :]
        identity, version = version.identity, version.version
    if version is None:
        named = current(versions)
        version, identity = named.version, identity or named.identity
        named_by = f", which {CURRENT} names" if named.text is not None else ""
    chosen = versions.find(version)
    if chosen is None:
        if version in versions.unreadable():
            raise DataError(f"{versions.where(version)} is damaged: its {COMMIT_FILE} cannot be read", _OTHER)
        committed = versions.committed()
        if not committed:
            raise no_versions(uri)
        what = f"has no version {version}{named_by}" if version else "has no current version"
        fix = "" if version and not named_by else f"`embark rollback {uri} VERSION` makes one current; "
        raise UserError(f"{uri}: {what}", f"{fix}its versions: " + ", ".join(str(one.step) for one in committed))
    if identity not in ("", identity_of(chosen)):
        raise DataError(f"{versions.where(version)} has other content than the wanted version{named_by}: its identity "
                        f"is {short_identity(identity_of(chosen))}, and not {short_identity(identity)}",
                        f"`embark rollback {uri} {version}` serves what is there now")
    return versions, delta_chain(versions, chosen, until)


def short_identity(identity: str) -> str:
    """Return the beginning of an identity, for people to compare."""
    return identity[:12]


def _folders(versions: CheckpointStore, chain: Sequence[Checkpoint], *, is_fetched: bool) -> list[Path]:
    """Return the folder of each version of a chain. The weights of a delta are checked after they are put together."""
    skipped = WEIGHTS if len(chain) > 1 and DELTA not in chain[0].files else ""
    return [_on_this_machine(versions, one, skipped=skipped if one is chain[0] else "", is_fetched=is_fetched)
            for one in chain]


def _advanced(uri: str, versions: CheckpointStore, chain: Sequence[Checkpoint], onto: Artifact, *,
              is_fetched: bool) -> Artifact:
    """Return the last version of a chain that begins with `onto`."""
    if len(chain) == 1:
        same = copy(onto)
        vars(same).update(uri=uri, version=chain[0].step)
        return same
    folders = [_on_this_machine(versions, one, is_fetched=is_fetched) for one in chain[1:]]
    weights, id_maps, identities = onto.weights, onto.id_maps, onto.identities
    vars(onto).update(identities=())  # from here on its arrays are those of no version
    for folder in folders:
        delta = map_file(folder / DELTA)
        weights, id_maps = (apply_delta(file, before, delta, str(folder))
                            for file, before in ((WEIGHTS, weights), (ID_MAPS, id_maps)))
    found = Artifact(uri, chain[-1].step, folders[-1], _read_info(folders[-1] / INFO), chain[-1].num_bytes,
                     deltas=(*onto.deltas, *folders), base=onto.base or onto.folder,
                     identities=(*identities, *(identity_of(one) for one in chain[1:])))
    vars(found).update(weights=weights, id_maps=id_maps)  # as read already
    # The tensors were verified when `onto` was opened, nothing else writes into them, each delta names the identity of
    # what it changes, and its file was verified above: so the result is proven without reading all tables, which takes
    # 0.8 s for each GB.
    return found


def _check_tensors(found: Artifact, versions: CheckpointStore, chain: Sequence[Checkpoint]) -> None:
    """Raise if the tensors that were put together of a chain of deltas are not those of a full export."""
    for file in (WEIGHTS, ID_MAPS) if found.deltas else ():
        tensors = found.weights if file == WEIGHTS else found.id_maps
        if tensors_checksum(tensors, file_metadata(found.info)) != checksum_of(chain[-1], file):
            raise DataError(f"{versions.where(found.version)} is damaged: {file} put together from version "
                            f"{chain[0].step} and {len(chain) - 1} deltas has other bytes", _OTHER)


def _check_ids(found: Artifact) -> None:
    """Raise if rows could get ids that the tables do not have."""
    rows, model = found.info.rows, found.info.model
    tables = {table.name: table for table in model.scored_features()}

    def refuse(what: str, file: str = INFO) -> None:
        raise DataError(f"{found.folder / file}: {what}", "it was not written by Embark: export the run again")

    numbers, statistics = rows.coded_numbers(), rows.columns.statistics_names
    if tuple(code.column for code in numbers.codes) != rows.columns.dense_names or \
            (*numbers.names, *statistics) != rows.layout.dense:
        refuse("rows.numbers are not the dense values of rows.layout")
    for column in statistic_columns(rows.columns).values():
        both = [found.id_maps.get(f"{column.name}.statistics{part}") for part in (".keys", "")]
        if both[0] is None or both[1] is None or not are_statistics(both[0], both[1], len(column.statistics)):
            refuse(f"{column.name}.statistics are not finite numbers of each key", ID_MAPS)
    for feature in rows.layout.features:
        name, table, hashed_rows = feature.name, tables.get(feature.name), rows.hashed_rows.get(feature.name)
        keys, ids = (found.id_maps.get(f"{name}.{part}") for part in ("keys", "ids"))
        if name not in {column.name for column in rows.columns.sparse}:
            refuse(f"rows.layout has the feature {name!r}, and rows.columns has no such column")
        if table and table.lookup and feature.rows > table.stored_rows:
            refuse(f"rows.layout: {name!r} has {feature.rows} rows, and its table {table.stored_rows}")
        if keys is not None or ids is not None or (table and table.is_dynamic):
            if keys is None or ids is None or keys.shape != ids.shape or keys.ndim != 1 or keys.dtype.kind != "u":
                refuse(f"{name}.keys and {name}.ids are not keys and the id of each", ID_MAPS)
            elif ids.dtype.kind not in "iu" or ids.min(initial=0) < 0 or ids.max(initial=0) >= feature.rows:
                refuse(f"{name}.ids has ids from {ids.min(initial=0)} to {ids.max(initial=0)}, and the table has 0 to "
                       f"{feature.rows - 1}", ID_MAPS)
        fewest = 1 if keys is None else 0
        if hashed_rows is None or not fewest <= hashed_rows <= feature.rows:
            refuse(f"rows.hashed_rows: {name!r} has {hashed_rows}, and not {fewest} to {feature.rows}")


def delta_chain(versions: CheckpointStore, chosen: Checkpoint, until: str = "") -> list[Checkpoint]:
    """Return the full version that a delta goes back to, or the version with the identity `until` if it comes first,
    and the deltas up to it."""
    chain = [chosen]
    while DELTA in chain[0].files and identity_of(chain[0]) != until:
        values = chain[0].values
        number = values.get(PARENT)
        parent = versions.find(number) if isinstance(number, int) else None
        if parent is None or parent.step >= chain[0].step or not parent_values(parent).items() <= values.items():
            raise DataError(f"{versions.where(chosen.step)} is a delta that needs version {number}, which is "
                            f"{'gone' if parent is None else 'another one now'}", _OTHER)
        chain.insert(0, parent)
    return chain


def check_sizes(versions: CheckpointStore, chosen: Checkpoint, fix: str) -> None:
    """Raise if a file of a version, or of one that it is a delta of, is gone or has another size."""
    for link in delta_chain(versions, chosen):
        for name, mark in link.files.items():
            try:
                size = versions.store.size(f"{link.name}/{name}")
            except NotFound:
                size = 0
            if size != mark.size_bytes:
                raise DataError(f"{versions.where(link.step)} is damaged: {name} has {size:,} bytes instead of "
                                f"{mark.size_bytes:,}", fix)


def parent_values(parent: Checkpoint) -> JsonDict:
    """Return what the commit record of a delta says about the version that it changes."""
    return {PARENT: parent.step, PARENT_IDENTITY: identity_of(parent),
            PARENT_WEIGHTS: checksum_of(parent, WEIGHTS).sha256, PARENT_ID_MAPS: checksum_of(parent, ID_MAPS).sha256}


def checksum_of(version: Checkpoint, file: str) -> FileChecksum:
    """Return the checksum that a file of tensors has in a full export, even if the version is a delta."""
    if file in version.files:
        return version.files[file]
    try:
        size, digest = version.values[TENSOR_FILES][file]
        return FileChecksum(int(size), str(digest))
    except (KeyError, TypeError, ValueError):
        return FileChecksum(0, "")


def file_metadata(info: ArtifactInfo) -> dict[str, str]:
    """Return what stands in the header of each file of tensors."""
    return {"run": info.run, "step": str(info.step), "tables": info.tables}


def no_versions(uri: str) -> UserError:
    """Return the error for a URI without versions."""
    return UserError(f"{uri}: has no exported model", _suggested_uri(uri))


def _suggested_uri(uri: str) -> str:
    """Guess which URI was meant by one without versions."""
    folder, _, name = uri.rpartition("/")
    if re.fullmatch(r"version-\d+", name):
        return f"name the folder that holds the versions: {folder or '.'} --version {int(name.partition('-')[2])}"
    for found in (f"{uri}/export", f"runs/{uri}/export"):
        if open_versions(found).committed():
            return f"the run's exported model is {found}"
    return f"`embark export RUN --to {uri}` writes one"


def _on_this_machine(
    versions: CheckpointStore, chosen: Checkpoint, *, skipped: str = "", is_fetched: bool
) -> Path:
    """Return the local folder of a version whose files match their checksums, except for `skipped`, which is checked
    later. Those of an object store are fetched."""
    folder = _own_folder(versions, chosen)
    if is_fetched:
        copied = _copy_folder(versions, chosen)
        return copied if folder is None or copied.is_dir() else folder
    if folder is None:
        return _fetch(versions, chosen)
    _check(versions, versions, chosen, [name for name in chosen.files if name != skipped])
    return folder


def _own_folder(versions: CheckpointStore, chosen: Checkpoint) -> Path | None:
    """Return the folder that a version was exported to; None in an object store."""
    uri = versions.store.uri.removeprefix("file://")
    return None if "://" in uri else Path(uri) / chosen.name


def copy_folders(versions: CheckpointStore, chain: Sequence[Checkpoint]) -> set[Path]:
    """Return the folders of the user's cache for copies of a chain's versions."""
    return {_copy_folder(versions, one) for one in chain}


def _copy_folder(versions: CheckpointStore, chosen: Checkpoint) -> Path:
    return _fetched(versions) / f"{chosen.step}-{identity_of(chosen)[:16]}" / chosen.name


def _fetch(versions: CheckpointStore, chosen: Checkpoint) -> Path:
    """Return the folder of the user's cache with checked copies of a version's files."""
    folder, own = _copy_folder(versions, chosen), _own_folder(versions, chosen)
    here = open_versions(str(folder.parent))
    wanted = [name for name in chosen.files if here.damages(chosen, [name])]
    try:
        with suppress(NotFound):  # which is found below
            versions.store.download_many([(f"{chosen.name}/{name}", folder / name) for name in wanted])
    except EmbarkError as error:
        if own is None:
            raise
        _remove_copy(folder.parent)
        _log.warning("%s is served from there, where nothing may change it: it cannot be copied to %s (EMBARK_CACHE): "
                     "%s", own, folder, error.what)
        _check(versions, versions, chosen, list(chosen.files))
        return own
    _check(versions, here, chosen, wanted)
    return folder


def _check(versions: CheckpointStore, here: CheckpointStore, chosen: Checkpoint, names: Sequence[str]) -> None:
    if damages := here.damages(chosen, names):
        raise DataError(f"{versions.where(chosen.step)} is damaged: {damages[0]}", _OTHER)


def make_room(uri: str, wanted: int | VersionId | None, in_use: Collection[Path] = ()) -> None:
    """Delete the copies of other versions before one is fetched, so that two versions need disk and not three. `in_use`
    are the folders of the version that answers."""
    versions, chain = _chain(uri, wanted, "", "")
    folders = copy_folders(versions, chain)
    if not all(folder.is_dir() for folder in folders):
        remove_fetched(versions, {*in_use, *folders})


def remove_fetched(versions: CheckpointStore, keep: Collection[Path]) -> None:
    """Delete the copies of versions, except for these folders and those that another server holds."""
    for folder in _fetched(versions).glob("*/*"):
        if folder not in keep:
            _remove_copy(folder.parent)


_held: dict[Path, int] = {}  # Descriptors of folders of copies; their locks are gone with this process.


def _hold(folder: Path) -> None:
    """Keep other servers of this machine from deleting a folder of copies."""
    while True:
        make_directory(folder)
        if folder in _held:
            if os.fstat(_held[folder]).st_ino == folder.stat().st_ino:
                return
            os.close(_held.pop(folder))  # the folder was deleted, maybe while this process waited for the lock
        _held[folder] = os.open(folder, os.O_RDONLY)
        fcntl.flock(_held[folder], fcntl.LOCK_SH)


def _remove_copy(folder: Path) -> None:
    """Delete a folder of copies, unless another server holds it."""
    if folder in _held:
        os.close(_held.pop(folder))
    with suppress(OSError), ExitStack() as at_end:
        descriptor = os.open(folder, os.O_RDONLY)
        at_end.callback(os.close, descriptor)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise
        shutil.rmtree(folder)


def _fetched(versions: CheckpointStore) -> Path:
    cache = Path(os.getenv("EMBARK_CACHE", "~/.cache/embark")).expanduser() / "exported"
    return cache / hashlib.sha256(versions.store.uri.encode()).hexdigest()[:16]


def _read_info(path: Path) -> ArtifactInfo:
    text = path.read_bytes()
    try:
        info = ArtifactInfo.model_validate_json(text)
        if info.model.code:
            raise DataError(f"{path}: holds code, which is never run", "export the run again")
        return info
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        if first["loc"] == ("format_version",):
            raise DataError(f"{path}: its format is version {first['input']}, this Embark reads {FORMAT_VERSION}",
                            "export the run again, or use the Embark that wrote it") from None
        raise DataError(f"{path}: does not describe an exported model "
                        f"({'.'.join(map(str, first['loc']))}: {first['msg']})", "export the run again") from None
