"""Writes the next version of an exported model: all of it, or what changed since the current one."""

import json
from collections.abc import Sequence
from dataclasses import field

from embark.errors import UserError
from embark.store import Checkpoint, CheckpointStore, ChecksumWriter, NotFound, checkpoint_name
from embark.values import JsonMap, frozen
from .artifact import (
    CANDIDATE,
    ID_MAPS,
    INFO,
    ITEMS,
    WEIGHTS,
    Artifact,
    ArtifactInfo,
    current,
    delta_chain,
    file_metadata,
    open_artifact,
    open_versions,
    parent_values,
)
from .delta import DELTA, PARENT, TENSOR_FILES, DeltaSize, TooManyChanges, delta_of, identity_of
from .reference import REFERENCE, Reference
from .safetensors_file import TensorSource, file_of

CHECKPOINT, CHECKPOINT_TIME = "checkpoint", "checkpoint_time_s"
"""Keys of a commit record: the identity of the checkpoint that was exported, and when it was saved."""
WRITTEN_OVER = "written_over"  # Key of a candidate's commit record: the text of `current.json` before it was written.
NUMBERS = "numbers.json"
MAX_DELTAS = 64  # Deltas after which a full version is written.
MAX_SHARE = 0.5  # The share of the full version's bytes that its deltas may take together.
MAX_DELTA_BYTES = 1 << 30  # Changed rows are held in memory.


@frozen
class VersionContents:
    """The contents of a version."""

    info: ArtifactInfo
    reference: Reference
    id_maps: Sequence[TensorSource]
    weights: Sequence[TensorSource]
    items: Sequence[TensorSource] = ()  # Items of a retrieval model.
    checkpoint: Checkpoint | None = None  # The checkpoint that it is made of.


@frozen
class WrittenVersion:
    """A version that was committed."""

    version: int
    path: str
    num_bytes: int
    identity: str  # The checksum of its content.
    parent: int | None = None  # The version that a delta changes.
    num_changed_rows: int = 0
    why_full: str = ""  # Why no delta was written, although one was asked for.


@frozen
class _Delta:
    tensors: Sequence[TensorSource] = ()
    num_rows: int = 0
    values: JsonMap = field(default_factory=dict)  # Entries of the commit record about the delta.


def write_version(contents: VersionContents, uri: str, *, delta: bool = False, candidate: bool = False
                  ) -> WrittenVersion:
    """Write the next version at `uri` without making it current. A `candidate` does not become current either if there
    is no `current.json`."""
    versions, info = open_versions(uri), contents.info
    over = current(versions).text if candidate else None
    changes, why_full = _changes(contents, versions) if delta else (_Delta(), "")
    text = info.model_dump_json(indent=1).encode() + b"\n"
    number = _next_number(versions)
    while not versions.store.create(f"{checkpoint_name(number, 'version')}/{INFO}", text):
        number = _next_number(versions)  # of two exports at once each has a version of its own
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
    made_of = contents.checkpoint
    source = {CHECKPOINT: identity_of(made_of), CHECKPOINT_TIME: made_of.values.get("time_s")} if made_of else {}
    values = {**about, **source, "eval": info.metrics, **changes.values, **(
        {CANDIDATE: True, WRITTEN_OVER: over.decode() if over else None} if candidate else {})}
    versions.commit(number, marks, values)
    written = Checkpoint(number, marks, values)
    return WrittenVersion(
        version=number, path=versions.where(number), num_bytes=written.num_bytes, identity=identity_of(written),
        parent=changes.values.get(PARENT), num_changed_rows=changes.num_rows, why_full=why_full)


_MAX_NUMBER = 10**17  # Larger ones would not name a folder of a version.

def _next_number(versions: CheckpointStore) -> int:
    """Take a number that no version at this URI ever had, also one whose folder was deleted since."""
    while True:
        text, last = None, 0
        try:
            text = versions.store.read(NUMBERS)
            last = int(json.loads(text)["last"])
            last = last if 0 <= last < _MAX_NUMBER else 0
        except (NotFound, ValueError, TypeError, KeyError, OverflowError, RecursionError):
            pass  # none yet, or damaged
        number = 1 + max((last, *(one.step for one in versions.committed()), *versions.unfinished(),
                          *versions.unreadable()))
        taken = (json.dumps({"last": number}) + "\n").encode()
        if versions.store.create(NUMBERS, taken) if text is None else versions.store.replace(NUMBERS, taken, text):
            return number


def _changes(contents: VersionContents, versions: CheckpointStore) -> tuple[_Delta, str]:
    """Return what changed since the current version, or the reason why a full version must be written."""
    if contents.info.item_index:
        return _Delta(), "its item index is built anew"
    try:
        named = current(versions)
        if not (parent := versions.find(named.version)):
            return _Delta(), "there is no current version"
        chain = delta_chain(versions, parent)
        before = open_artifact(versions.store.uri, named.version, identity=named.identity)
    except UserError as error:
        return _Delta(), f"the current version cannot be read: {error.what}"
    full = sum(mark.size_bytes for name, mark in chain[0].files.items() if name in (WEIGHTS, ID_MAPS))
    used = sum(one.files[DELTA].size_bytes for one in chain[1:])
    if len(chain) > MAX_DELTAS:
        return _Delta(), f"version {parent.step} consists of {len(chain) - 1} deltas already"
    size = DeltaSize(min(int(MAX_SHARE * full) - used, MAX_DELTA_BYTES))
    try:
        return _compared(contents, before, parent, size), ""
    except TooManyChanges:
        return _Delta(), f"with the changes since version {chain[0].step} the deltas would be more than " \
                         f"{MAX_SHARE:.0%} of it, or its tensors are others"


def _compared(contents: VersionContents, before: Artifact, parent: Checkpoint, size: DeltaSize) -> _Delta:
    about, tensors, files = file_metadata(contents.info), [], {}
    for file, now, earlier in ((WEIGHTS, contents.weights, before.weights),
                               (ID_MAPS, contents.id_maps, before.id_maps)):
        mark, changed = delta_of(file, now, earlier, about, size)
        tensors += changed
        files[file] = [mark.size_bytes, mark.sha256]
    return _Delta(tensors, size.num_rows, {**parent_values(parent), TENSOR_FILES: files})
