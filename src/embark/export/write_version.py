"""Writes the next version of an exported model: all of it, or what changed since the current one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from embark.errors import DataError, UserError
from embark.export.artifact import (
    CANDIDATE,
    ID_MAPS,
    INFO,
    ITEMS,
    WEIGHTS,
    Artifact,
    ArtifactInfo,
    checksum_of,
    current_version,
    delta_chain,
    file_metadata,
    open_artifact,
    open_versions,
)
from embark.export.delta import DELTA, PARENT, PARENT_WEIGHTS, TENSOR_FILES, DeltaSize, TooManyChanges, delta_of
from embark.export.reference import REFERENCE, Reference
from embark.export.safetensors_file import TensorSource, file_of
from embark.store import CheckpointStore, ChecksumWriter, checkpoint_name

MAX_DELTAS = 64  # Deltas after which a full version is written.
MAX_SHARE = 0.5  # The share of the full version's bytes that its deltas may take together.
MAX_DELTA_BYTES = 1 << 30  # Changed rows are held in memory.


@dataclass(frozen=True, slots=True)
class VersionContents:
    """The contents of a version."""

    info: ArtifactInfo
    reference: Reference
    id_maps: Sequence[TensorSource]
    weights: Sequence[TensorSource]
    items: Sequence[TensorSource] = ()  # Items of a retrieval model.


@dataclass(frozen=True, slots=True)
class WrittenVersion:
    """A version that was committed."""

    version: int
    path: str
    num_bytes: int
    parent: int | None = None  # The version that a delta changes.
    num_changed_rows: int = 0
    why_full: str = ""  # Why no delta was written, although one was asked for.


@dataclass(frozen=True, slots=True)
class _Delta:
    tensors: Sequence[TensorSource] = ()
    num_rows: int = 0
    values: Mapping[str, Any] = field(default_factory=dict)  # Entries of the commit record about the delta.


def write_version(contents: VersionContents, uri: str, *, delta: bool = False, candidate: bool = False,
                  ) -> WrittenVersion:
    """Write the next version at `uri` without making it current. A `candidate` does not become current either if there
    is no `current.json`."""
    versions, info = open_versions(uri), contents.info
    changes, why_full = _changes(contents, versions) if delta else (_Delta(), "")
    text = info.model_dump_json(indent=1).encode() + b"\n"
    number = 1 + max((0, *(one.step for one in versions.committed()), *versions.unfinished(), *versions.unreadable()))
    while not versions.store.create(f"{checkpoint_name(number, 'version')}/{INFO}", text):
        number += 1  # of two exports at once each has a version of its own
    folder, store = checkpoint_name(number, "version"), ChecksumWriter(versions.store)
    store.write(f"{folder}/{INFO}", text)
    store.write(f"{folder}/{REFERENCE}", contents.reference.model_dump_json(indent=1).encode() + b"\n")
    about = file_metadata(info)
    files = [(DELTA, changes.tensors)] if changes.values else [
        (ID_MAPS, contents.id_maps), (WEIGHTS, contents.weights),
        *([(ITEMS, contents.items)] if info.item_index else [])]
    for name, tensors in files:
        size, pieces = file_of(tensors, about)
        store.write(f"{folder}/{name}", pieces, size)
    marks = {path.removeprefix(f"{folder}/"): mark for path, mark in store.marks.items()}
    versions.commit(number, marks, {**about, "eval": info.metrics, **changes.values,
                                    **({CANDIDATE: True} if candidate else {})})
    return WrittenVersion(
        version=number, path=versions.where(number), num_bytes=sum(mark.size_bytes for mark in marks.values()),
        parent=changes.values.get(PARENT), num_changed_rows=changes.num_rows, why_full=why_full)


def _changes(contents: VersionContents, versions: CheckpointStore) -> tuple[_Delta, str]:
    """Return what changed since the current version, or the reason why a full version must be written."""
    if contents.info.item_index:
        return _Delta(), "a retrieval model has an item index, which is built anew"
    try:
        if not (current := versions.find(current_version(versions))):
            return _Delta(), "there is no current version"
        chain = delta_chain(versions, current)
        before = open_artifact(versions.store.uri, current.step)
    except (DataError, UserError) as error:
        return _Delta(), f"the current version cannot be read: {error.what}"
    full = sum(mark.size_bytes for name, mark in chain[0].files.items() if name in (WEIGHTS, ID_MAPS))
    used = sum(one.files[DELTA].size_bytes for one in chain[1:])
    if len(chain) > MAX_DELTAS:
        return _Delta(), f"version {current.step} consists of {len(chain) - 1} deltas already"
    size = DeltaSize(min(int(MAX_SHARE * full) - used, MAX_DELTA_BYTES))
    try:
        return _compared(contents, before, checksum_of(current, WEIGHTS).sha256, size), ""
    except TooManyChanges:
        return _Delta(), f"with the changes since version {chain[0].step} the deltas would be more than " \
                         f"{MAX_SHARE:.0%} of it, or its tensors are others"


def _compared(contents: VersionContents, before: Artifact, checksum: str, size: DeltaSize) -> _Delta:
    about, tensors, files = file_metadata(contents.info), [], {}
    for file, now, earlier in ((WEIGHTS, contents.weights, before.weights),
                               (ID_MAPS, contents.id_maps, before.id_maps)):
        mark, changed = delta_of(file, now, earlier, about, size)
        tensors += changed
        files[file] = [mark.size_bytes, mark.sha256]
    return _Delta(tensors, size.num_rows, {
        PARENT: before.version, PARENT_WEIGHTS: checksum, TENSOR_FILES: files})
