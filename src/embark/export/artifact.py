"""An exported model: numbered versions in a folder or an object store, each committed complete or invisible.

    version-000000001/artifact.json          what it is, and how a raw row becomes ids
    version-000000001/weights.safetensors    the dense network and the tables
    version-000000001/id_maps.safetensors    the key of each value of a column, rising, and its id
    version-000000001/items.safetensors      of a retrieval model: its items, their values, the index that searches them
    version-000000001/reference.json         what it was evaluated on: bins of each column's values, of the scores
    version-000000001/commit.json            the mark: every file with its size and checksum
    current.json                             the version that is scored and served with

Opening one reads arrays and JSON, so that nothing in it can run code. `FORMAT_VERSION` changes too when the same cell
becomes another key, as it would with another hash.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, SerializerFunctionWrapHandler, ValidationError, model_serializer

from embark.data.id_maps import IdMap, RowEncoder
from embark.data.prepare.rows import dense_transform
from embark.data.prepare.schema import Schema
from embark.data.prepared import Layout
from embark.data.prepared.manifest import MANIFEST
from embark.errors import DataError, UserError
from embark.export.quantize import TableDtype
from embark.export.reference import REFERENCE, Reference
from embark.export.safetensors_file import Array, map_file
from embark.spec.data import PrepareSpec
from embark.spec.model import ModelSpec
from embark.spec.user_code import file_of
from embark.store import Checkpoint, CheckpointStore, checkpoint_name, open_store
from embark.store.checkpoint_store import COMMIT_FILE
from embark.store.errors import NotFound
from embark.store.run_dir import SPEC

FORMAT_VERSION = 1
INFO, WEIGHTS, ID_MAPS, ITEMS = "artifact.json", "weights.safetensors", "id_maps.safetensors", "items.safetensors"
CURRENT = "current.json"
_OTHER = "choose another version with --version or `embark rollback`, or export the run again"
DENSE = "dense."  # What the names of the dense network's weights begin with.


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class RowFormat(_Section):
    """All that is between a raw row and the first id."""

    columns: Schema
    prepare: PrepareSpec
    layout: Layout
    hashed_rows: dict[str, int]  # By table: the modulus of values without an entry in the map; 0: they have id 0.
    plain_ids: Literal["refuse", "clip"] | None = None  # The rows hold ids; what becomes of those no table has.

    @model_serializer(mode="wrap")
    def _without_labels(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Rows to score have none; the file stays what it was before there were several."""
        values: dict[str, Any] = dump(self)
        for part in ("columns", "layout"):
            values[part] = {key: value for key, value in values[part].items() if key != "labels"}
        return values


class ItemIndexInfo(_Section):
    """The index of a retrieval model's items."""

    num_items: int
    kind: str  # `exact`, or `hnsw` with its width of search.
    k: int
    recall: float  # The share of an exact search's first `k` items that it finds, a mean over the queries.
    num_queries: int  # Users of held-out samples.


class ArtifactInfo(_Section):
    """What a version is."""

    format: Literal["embark-artifact"] = "embark-artifact"
    format_version: int = FORMAT_VERSION
    embark: str
    run: str
    step: int
    tables: TableDtype
    model: ModelSpec
    code_sha256: str = ""  # Of the file of a model of the user's own; its text is no part of an artifact.
    rows: RowFormat
    item_index: ItemIndexInfo | None = None
    metrics: dict[str, float] = {}  # Of the run's last evaluation before the checkpoint.


def code_digest(code: str) -> str:
    """Of the text of a model's file."""
    return hashlib.sha256(code.encode()).hexdigest()


@dataclass(frozen=True)
class Artifact:
    """A version whose files are on this machine and are what its mark says."""

    place: str
    version: int
    folder: Path
    info: ArtifactInfo
    num_bytes: int

    @cached_property
    def weights(self) -> dict[str, Array]:
        """By name, mapped."""
        return map_file(self.folder / WEIGHTS)

    @cached_property
    def items(self) -> dict[str, Array]:
        """Of a retrieval model: by name, mapped."""
        return map_file(self.folder / ITEMS)

    @cached_property
    def reference(self) -> Reference:
        """What its requests are compared with."""
        path = self.folder / REFERENCE
        if not path.exists():
            return Reference(why_none="the artifact was exported by an earlier Embark, which wrote no reference")
        try:
            return Reference.model_validate_json(path.read_bytes())
        except ValidationError:
            return Reference(why_none="the artifact was exported by a later Embark, whose reference has another form")

    def model_with_code(self, model_file: str) -> ModelSpec:
        """The model; one of the user's own with the code of a file that the operator names, which must be the file it
        was trained with. Only that file is ever run."""
        model = self.info.model
        if not model.is_own:
            if model_file:
                raise UserError(f"--model-file: the model is {model.kind}, which needs no file", fix="leave it out")
            return model
        fix = f"--model-file {file_of(model.kind)}: the file that the run was trained with"
        if not model_file:
            raise UserError(f"{self.place}: its model is {model.kind}, and an artifact holds no code", fix=fix)
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
        """From raw rows to what the model takes."""
        rows, arrays = self.info.rows, map_file(self.folder / ID_MAPS)
        columns = {column.name: column for column in rows.columns.sparse}
        maps = tuple(IdMap(columns[feature.name], feature, arrays.get(f"{feature.name}.keys"),
                           arrays.get(f"{feature.name}.ids"), rows.hashed_rows[feature.name])
                     for feature in rows.layout.features)
        return RowEncoder(dense_transform(rows.prepare, rows.columns), rows.layout, maps, rows.plain_ids)


def open_versions(place: str) -> CheckpointStore:
    """The versions at a place."""
    return CheckpointStore(open_store(place), kind="version")


def current_version(versions: CheckpointStore) -> int:
    """The version that `current.json` names; without this file the newest, or 0 where there is none."""
    try:
        number = json.loads(versions.store.read(CURRENT))["version"]
        if type(number) is not int:
            raise ValueError
        return number
    except NotFound:
        return max((0, *(one.step for one in versions.committed()), *versions.unreadable()))
    except (ValueError, TypeError, KeyError, RecursionError):
        place = versions.store.uri
        raise DataError(f"{versions.store.where(CURRENT)} is damaged: it names no version",
                        fix=f"`embark rollback {place} VERSION` writes it again; --list lists the versions") from None


def set_current(versions: CheckpointStore, version: int) -> None:
    """Score and serve with this version from now on; readers see the old one or the new one."""
    versions.store.write(CURRENT, (json.dumps({"version": version}) + "\n").encode())


def open_artifact(place: str, version: int | None = None) -> Artifact:
    """The current version at `place`, which must not be damaged, or this one; from an object store through a folder
    of the user's cache."""
    place = place.rstrip("/") or place
    versions = open_versions(place)
    number = current_version(versions) if version is None else version
    chosen = versions.find(number)
    if chosen is None:
        if number in versions.unreadable():
            raise DataError(f"{versions.where(number)} is damaged: its {COMMIT_FILE} cannot be read", fix=_OTHER)
        committed = versions.committed()
        if not committed:
            raise no_versions(place)
        raise UserError(f"{place}: has no version {number}",
                        fix="its versions: " + ", ".join(str(one.step) for one in committed))
    here, folder = _on_this_machine(place, versions, chosen)
    if damages := here.damages(chosen):
        raise DataError(f"{versions.where(chosen.step)} is damaged: {damages[0]}", fix=_OTHER)
    return Artifact(place, chosen.step, folder, _read_info(folder / INFO), chosen.num_bytes)


def no_versions(place: str) -> UserError:
    """Of a place without versions."""
    return UserError(f"{place}: has no exported model", fix=_other_place(place))


def _other_place(place: str) -> str:
    """What is meant by a place without versions."""
    folder, _, name = place.rpartition("/")
    if re.fullmatch(r"version-\d+", name):
        return f"name the folder that holds the versions: {folder or '.'} --version {int(name.partition('-')[2])}"
    for found in (f"{place}/export", f"runs/{place}/export"):
        if open_versions(found).committed():
            return f"the run's exported model is {found}"
    store = open_store(place)
    if store.exists(MANIFEST):
        return "this is prepared data; name what `embark export RUN` wrote, such as runs/RUN/export"
    if store.exists(SPEC):
        return f"`embark export {place}` writes one, to {place}/export"
    return f"`embark export RUN --to {place}` writes one"


def _on_this_machine(place: str, versions: CheckpointStore, chosen: Checkpoint) -> tuple[CheckpointStore, Path]:
    """Where its files are here; those of an object store that are not here yet, or are damaged, are fetched."""
    if "://" not in place or place.startswith("file://"):
        return versions, Path(versions.store.uri.removeprefix("file://")) / chosen.name
    mark = "".join([chosen.name, *sorted(checksum.sha256 for checksum in chosen.files.values())])
    folder = _fetched(place) / hashlib.sha256(mark.encode()).hexdigest()[:16] / chosen.name
    here = open_versions(str(folder.parent))
    wanted = [name for name in chosen.files if here.damages(chosen, [name])]
    versions.store.download_many([(f"{chosen.name}/{name}", folder / name) for name in wanted])
    return here, folder


def remove_fetched(place: str, keep: Collection[Path]) -> None:
    """Delete what was fetched of a place in an object store, but for these versions' folders."""
    for folder in _fetched(place).glob("*/*"):
        if folder not in keep:
            shutil.rmtree(folder.parent, ignore_errors=True)


def _fetched(place: str) -> Path:
    cache = Path(os.environ.get("EMBARK_CACHE", "~/.cache/embark")).expanduser() / "exported"
    return cache / hashlib.sha256(place.encode()).hexdigest()[:16]


def _read_info(path: Path) -> ArtifactInfo:
    text = path.read_bytes()
    try:
        head = _Head.model_validate_json(text)
        if head.format_version != FORMAT_VERSION:
            raise DataError(f"{path}: its format is version {head.format_version}, this Embark reads {FORMAT_VERSION}",
                            fix="export the run again, or use the Embark that wrote it")
        info = ArtifactInfo.model_validate_json(text)
        if info.model.code:
            raise DataError(f"{path}: holds code, which is never run", fix="export the run again")
        return info
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise DataError(f"{path}: does not describe an exported model "
                        f"({'.'.join(map(str, first['loc']))}: {first['msg']})", fix="export the run again") from None


class _Head(BaseModel):
    format: Literal["embark-artifact"]
    format_version: int
