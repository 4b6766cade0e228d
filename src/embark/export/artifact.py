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

A version may be a delta: instead of weights and id maps it has `delta.safetensors`, what changed since its parent.

Opening one reads arrays and JSON, so that nothing in it can run code. `FORMAT_VERSION` changes too when the same cell
becomes another key, as it would with another hash.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    SerializerFunctionWrapHandler,
    ValidationError,
    field_validator,
    model_serializer,
)

from embark.data.prepared import Layout
from embark.errors import DataError, UserError
from embark.export.delta import DELTA, PARENT, PARENT_WEIGHTS, TENSOR_FILES, apply_delta, tensors_checksum
from embark.export.quantize import TableDtype
from embark.export.reference import REFERENCE, Reference
from embark.export.safetensors_file import Array, map_file
from embark.features.encoding import IdMap, RowEncoder, by_rising_key, dense_transform, same_lengths_of
from embark.features.schema import Schema
from embark.spec.data import REMOVED_OPTIONS, PrepareSpec
from embark.spec.model import ModelSpec
from embark.spec.user_code import file_of
from embark.store import Checkpoint, CheckpointStore, FileChecksum, checkpoint_name, open_store
from embark.store.checkpoint_store import COMMIT_FILE
from embark.store.errors import NotFound
from embark.store.run_dir import SPEC

FORMAT_VERSION: Literal[1] = 1
INFO, WEIGHTS, ID_MAPS, ITEMS = "artifact.json", "weights.safetensors", "id_maps.safetensors", "items.safetensors"
CURRENT, GATE = "current.json", "gate.json"
_OTHER = "choose another version with --version or `embark rollback`, or export the run again"
CANDIDATE = "candidate"  # Set in a commit record: the version becomes current only when `current.json` names it.
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

    @field_validator("columns", "prepare", mode="before")
    @classmethod
    def _without_removed(cls, values: Any) -> Any:
        """Leave out what this version no longer has: artifacts outlive it."""
        if not isinstance(values, dict):
            return values
        return {key: value for key, value in values.items() if key not in REMOVED_OPTIONS}

    @model_serializer(mode="wrap")
    def _without_labels(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave labels out: rows to score have none, and the file stays as it was before there were several labels."""
        values: dict[str, Any] = dump(self)
        for part in ("columns", "layout"):
            values[part] = {key: value for key, value in values[part].items() if key != "labels"}
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
                raise UserError(f"--model-file: the model is {model.kind}, which needs no file", fix="leave it out")
            return model
        fix = f"--model-file {file_of(model.kind)}: the file that the run was trained with"
        if not model_file:
            raise UserError(f"{self.uri}: its model is {model.kind}, and an artifact holds no code", fix=fix)
        try:
            code = Path(model_file).read_text(encoding="utf-8-sig")
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"{model_file}: cannot be read: {getattr(error, 'strerror', None) or error}",
                            fix=fix) from None
        if code_digest(code) != self.info.code_sha256:
            where = f"{self.info.run}/checkpoints/{checkpoint_name(self.info.step)}/{SPEC}"
            raise UserError(f"{model_file}: is not the code that the model was trained with",
                            fix=f"put back that text: it is model.code in {where}")
        return model.model_copy(update={"code": code})

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
        return RowEncoder(dense_transform(rows.prepare, rows.columns), rows.layout, maps, rows.plain_ids,
                          model.features_of_any_number, same_lengths_of(model))


def open_versions(uri: str) -> CheckpointStore:
    """Open the versions at a URI."""
    return CheckpointStore(open_store(uri.rstrip("/") or uri), kind="version")


def current_version(versions: CheckpointStore) -> int:
    """Return the version that `current.json` names; without this file the newest one, or 0 if there is none."""
    try:
        number = json.loads(versions.store.read(CURRENT))["version"]
        if type(number) is not int:
            raise ValueError
        return number
    except NotFound:
        return max((0, *(one.step for one in versions.committed() if not one.values.get(CANDIDATE)),
                    *versions.unreadable()))
    except (ValueError, TypeError, KeyError, RecursionError):
        uri = versions.store.uri
        raise DataError(f"{versions.store.where(CURRENT)} is damaged: it names no version",
                        fix=f"`embark rollback {uri} VERSION` writes it again; --list lists the versions") from None


def set_current(versions: CheckpointStore, version: int) -> None:
    """Score and serve with this version from now on. Readers see the old one or the new one."""
    versions.store.write(CURRENT, (json.dumps({"version": version}) + "\n").encode())


def read_gate(versions: CheckpointStore, version: int) -> dict[str, Any] | None:
    """Return the gate's verdict on a version that was written to be published, or None if there is none yet."""
    try:
        found = json.loads(versions.store.read(f"{checkpoint_name(version, 'version')}/{GATE}"))
        return found if isinstance(found, dict) else None
    except (NotFound, ValueError):
        return None


def write_gate(versions: CheckpointStore, version: int, record: Mapping[str, Any]) -> None:
    """Write the gate's verdict beside a version, completely or not at all."""
    text = json.dumps({**record, "time_s": round(time.time(), 3)}, indent=1) + "\n"
    versions.store.write(f"{checkpoint_name(version, 'version')}/{GATE}", text.encode())


def open_artifact(
    uri: str, version: int | None = None, onto: Artifact | None = None, *, is_checked: bool = False,
) -> Artifact:
    """Open the current version at `uri`, or the given one, after checking its files; from an object store through a
    folder of the user's cache. If it is a delta of `onto`, directly or through other deltas, these are written into the
    arrays of `onto`, which must not be used any more. With `is_checked`, `fetch_version` was called before, and the
    files are not read again."""
    uri = uri.rstrip("/") or uri
    versions, chain = _chain(uri, version, onto.version if onto and onto.uri == uri else 0)
    chosen = chain[-1]
    if onto and chain[0].step == onto.version and len(chain) > 1:
        return _advanced(uri, versions, chain[1:], onto)
    folders = _folders(versions, chain, is_checked=is_checked)
    found = Artifact(uri, chosen.step, folders[-1], _read_info(folders[-1] / INFO), chosen.num_bytes,
                     deltas=tuple(folders[1:]), base=folders[0] if len(folders) > 1 else None)
    for file in (WEIGHTS, ID_MAPS) if found.deltas else ():
        tensors = found.weights if file == WEIGHTS else found.id_maps
        if tensors_checksum(tensors, file_metadata(found.info)) != checksum_of(chosen, file):
            raise DataError(f"{versions.where(chosen.step)} is damaged: {file} put together from version "
                            f"{chain[0].step} and {len(found.deltas)} deltas has other bytes", fix=_OTHER)
    return found


def fetch_version(uri: str, version: int | None = None, have: int = 0) -> int:
    """Bring the files of the current version, or of the given one, to this machine, check them, and return its number.
    Files that version `have` consists of too are skipped."""
    versions, chain = _chain(uri, version, have)
    _folders(versions, chain[1:] if chain[0].step == have and len(chain) > 1 else chain, is_checked=False)
    return chain[-1].step


def _chain(uri: str, version: int | None, until: int) -> tuple[CheckpointStore, list[Checkpoint]]:
    """Return the versions at a URI, and the delta chain of the chosen one."""
    versions = open_versions(uri)
    number = current_version(versions) if version is None else version
    chosen = versions.find(number)
    if chosen is None:
        if number in versions.unreadable():
            raise DataError(f"{versions.where(number)} is damaged: its {COMMIT_FILE} cannot be read", fix=_OTHER)
        committed = versions.committed()
        if not committed:
            raise no_versions(uri)
        raise UserError(f"{uri}: has no version {number}",
                        fix="its versions: " + ", ".join(str(one.step) for one in committed))
    return versions, delta_chain(versions, chosen, until=until)


def _folders(versions: CheckpointStore, chain: Sequence[Checkpoint], *, is_checked: bool) -> list[Path]:
    """Return the folder of each version of a chain. The weights of a delta are checked after they are put together."""
    skipped = WEIGHTS if len(chain) > 1 and DELTA not in chain[0].files else ""
    return [_on_this_machine(versions, one, skipped=skipped if one is chain[0] else "", is_checked=is_checked)
            for one in chain]


def _advanced(uri: str, versions: CheckpointStore, deltas: Sequence[Checkpoint], onto: Artifact) -> Artifact:
    folders = [_on_this_machine(versions, one) for one in deltas]
    weights, id_maps = onto.weights, onto.id_maps
    for folder in folders:
        delta = map_file(folder / DELTA)
        weights, id_maps = (apply_delta(file, before, delta, str(folder))
                            for file, before in ((WEIGHTS, weights), (ID_MAPS, id_maps)))
    found = Artifact(uri, deltas[-1].step, folders[-1], _read_info(folders[-1] / INFO), deltas[-1].num_bytes,
                     deltas=(*onto.deltas, *folders), base=onto.base or onto.folder)
    found.__dict__.update(weights=weights, id_maps=id_maps)  # as read already
    return found


def delta_chain(versions: CheckpointStore, chosen: Checkpoint, until: int = 0) -> list[Checkpoint]:
    """Return the full version that a delta goes back to, or version `until` if it comes first, and the deltas up to
    it."""
    chain = [chosen]
    while DELTA in chain[0].files and chain[0].step != until:
        number = chain[0].values.get(PARENT)
        parent = versions.find(number) if isinstance(number, int) else None
        if parent is None or parent.step >= chain[0].step or \
                checksum_of(parent, WEIGHTS).sha256 != chain[0].values.get(PARENT_WEIGHTS):
            raise DataError(f"{versions.where(chosen.step)} is a delta that needs version {number}, which is "
                            f"{'gone' if parent is None else 'another one now'}", fix=_OTHER)
        chain.insert(0, parent)
    return chain


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
    return UserError(f"{uri}: has no exported model", fix=_suggested_uri(uri))


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
    versions: CheckpointStore, chosen: Checkpoint, *, skipped: str = "", is_checked: bool = False,
) -> Path:
    """Return the local folder of a version whose files match their checksums, except for `skipped`, which is checked
    later. Files of an object store that are absent or damaged are fetched."""
    here, uri = versions, versions.store.uri.removeprefix("file://")
    folder = Path(uri) / chosen.name
    if "://" in uri:
        mark = "".join([chosen.name, *sorted(checksum.sha256 for checksum in chosen.files.values())])
        folder = _fetched(versions) / hashlib.sha256(mark.encode()).hexdigest()[:16] / chosen.name
        here = open_versions(str(folder.parent))
        wanted = [name for name in chosen.files if not is_checked and here.damages(chosen, [name])]
        versions.store.download_many([(f"{chosen.name}/{name}", folder / name) for name in wanted])
    if not is_checked and (damages := here.damages(chosen, [name for name in chosen.files if name != skipped])):
        raise DataError(f"{versions.where(chosen.step)} is damaged: {damages[0]}", fix=_OTHER)
    return folder


def remove_fetched(versions: CheckpointStore, keep: Collection[Path]) -> None:
    """Delete what was fetched from an object store, except for these folders."""
    for folder in _fetched(versions).glob("*/*"):
        if folder not in keep:
            shutil.rmtree(folder.parent, ignore_errors=True)


def _fetched(versions: CheckpointStore) -> Path:
    cache = Path(os.environ.get("EMBARK_CACHE", "~/.cache/embark")).expanduser() / "exported"
    return cache / hashlib.sha256(versions.store.uri.encode()).hexdigest()[:16]


def _read_info(path: Path) -> ArtifactInfo:
    text = path.read_bytes()
    try:
        info = ArtifactInfo.model_validate_json(text)
        if info.model.code:
            raise DataError(f"{path}: holds code, which is never run", fix="export the run again")
        return info
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        if first["loc"] == ("format_version",):
            raise DataError(f"{path}: its format is version {first['input']}, this Embark reads {FORMAT_VERSION}",
                            fix="export the run again, or use the Embark that wrote it") from None
        raise DataError(f"{path}: does not describe an exported model "
                        f"({'.'.join(map(str, first['loc']))}: {first['msg']})", fix="export the run again") from None
