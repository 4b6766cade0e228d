"""Checkpoints of torch.distributed.checkpoint behind a store: any store, range reads, and nothing unpickled unchecked.

A checkpoint is `index.json` and, for each rank, a few `rank-….bin` of tensors' bytes one after another. So a rank
that loads under another sharding asks for just the rows it wants, and reading the index runs no code, where DCP's
own `.metadata` is a pickle. Values that are no tensors are pickled by torch and read back with `weights_only=True`.
"""

import io
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import (
    Metadata,
    MetadataIndex,
    StorageMeta,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from embark.errors import EmbarkError, Fault, UserError
from embark.run.checkpointer import NUM_FILES, PIECE_BYTES, balanced, file_name
from embark.store.checkpoint_index import INDEX, FileRange
from embark.store.object_store import ObjectStore, for_each_parallel, open_store
from embark.trainers.torch.dcp_spans import Chunk, Span, index_text, read_metadata, spans_of, together


def save(state: dict[str, Any], to: ObjectStore | str | Path, prefix: str = "", threads: int = NUM_FILES) -> None:
    """Write `state`; every rank calls it. What a rank raises is raised on all, as it was."""
    with plain_errors("save"):
        dcp.save(state, storage_writer=writer(to, prefix, threads))


def load(state: dict[str, Any], source: ObjectStore | str | Path, prefix: str = "", threads: int = 8) -> None:
    """Fill `state`'s tensors in place and replace its other values, under whatever sharding they have now."""
    with plain_errors("load"):
        dcp.load(state, storage_reader=reader(source, prefix, threads))


def writer(to: ObjectStore | str | Path, prefix: str = "", threads: int = NUM_FILES) -> StorageWriter:
    """For `dcp.save` and `dcp.async_save`: `threads` files a rank, written side by side."""
    return StoreWriter(to if isinstance(to, ObjectStore) else open_store(to), prefix, threads)


def reader(source: ObjectStore | str | Path, prefix: str = "", threads: int = 8) -> StorageReader:
    """For `dcp.load`: `threads` requests at once."""
    return StoreReader(source if isinstance(source, ObjectStore) else open_store(source), prefix, threads)


class StoreWriter(StorageWriter):
    """Each rank streams its tensors; the first one writes the index when all are through."""

    def __init__(self, store: ObjectStore, prefix: str, threads: int) -> None:
        self.store = store
        self.prefix = prefix.strip("/")
        self.threads = threads

    def reset(self, checkpoint_id: Any = None) -> None:
        if checkpoint_id is not None:
            self.prefix = str(checkpoint_id).strip("/")

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        if not kwargs.get("use_collectives", True):
            raise ValueError("the index is one file for all ranks, so saving needs collectives")

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return [replace(plan, storage_data=rank) for rank, plan in enumerate(plans)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        shares = balanced(plan.items, _num_bytes, self.threads)
        results: list[list[WriteResult]] = [[] for _ in shares]

        def write(number: int) -> None:
            results[number] = self._write_file(file_name(plan.storage_data, number), shares[number], planner)

        for_each_parallel(write, range(len(shares)), self.threads)
        done: Future[list[WriteResult]] = Future()
        done.set_result([result for share in results for result in share])
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        places = {result.index: result.storage_data for of_rank in results for result in of_rank}
        self.store.write(_join(self.prefix, INDEX), index_text(metadata, places).encode())

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return True

    def storage_meta(self) -> StorageMeta:
        return StorageMeta(checkpoint_id=self.store.where(self.prefix))

    def _write_file(self, name: str, items: list[WriteItem], planner: SavePlanner) -> list[WriteResult]:
        # Of values the size is known only once they are pickled; they are small.
        values = {item.index: planner.resolve_data(item).getvalue() for item in items if _is_value(item)}
        sizes = [len(values[item.index]) if _is_value(item) else _num_bytes(item) for item in items]
        results, start = [], 0
        for item, size in zip(items, sizes, strict=True):
            results.append(WriteResult(item.index, size, FileRange(name, start, size)))
            start += size

        def pieces() -> Iterator[memoryview]:
            for item in items:
                if _is_value(item):
                    yield memoryview(values[item.index])
                else:
                    yield from _pieces(planner.resolve_data(item))

        if start:
            self.store.write(_join(self.prefix, name), pieces(), start)
        return results


class StoreReader(StorageReader):
    """Each rank reads the index, and of the tensors the ranges its own shards need."""

    def __init__(self, store: ObjectStore, prefix: str, threads: int) -> None:
        self.store = store
        self.prefix = prefix.strip("/")
        self.threads = threads
        self._chunks: dict[MetadataIndex, Chunk] = {}
        self._error: EmbarkError | None = None

    def reset(self, checkpoint_id: Any = None) -> None:
        if checkpoint_id is not None:
            self.prefix = str(checkpoint_id).strip("/")

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        path = _join(self.prefix, INDEX)
        self._error = None
        try:
            return read_metadata(self.store.read(path), self.store.where(path))
        except EmbarkError as error:
            # Raised here, DCP would log it and look for an index of this rank's own, and lose what was wrong.
            self._error = error
            return Metadata({}, storage_data={})

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        if self._error:
            raise self._error
        self._chunks = metadata.storage_data

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        tensors = []
        for item in plan.items:
            chunk = self._chunks[item.storage_index]
            if item.type == LoadItemType.BYTE_IO:
                planner.load_bytes(item, self._safe_value(item, chunk.place))
            else:
                tensors.append((item, chunk, planner.resolve_tensor(item).detach()))
        spans = [span for item, chunk, target in tensors for span in spans_of(item, chunk, target)]
        for_each_parallel(self._fetch, together(spans), self.threads)
        for item, _, target in tensors:
            planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return True

    def _safe_value(self, item: ReadItem, place: FileRange) -> io.BytesIO:
        """Pickled anew: a planner may unpickle without checks, so it never gets bytes that came from a store."""
        data = self.store.read_range(_join(self.prefix, place.file), place.start, place.num_bytes)
        try:
            value = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
        except Exception as error:
            reason = str(error).partition("\n")[0]
            raise Fault(f"{self.store.where(self.prefix)}: {item.storage_index.fqn!r} is not a plain value: {reason}",
                        fix="Embark did not write this checkpoint, or it was changed since: take another") from None
        plain = io.BytesIO()
        torch.save(value, plain)
        plain.seek(0)
        return plain

    def _fetch(self, spans: list[Span]) -> None:
        first, last = spans[0], spans[-1]
        path = _join(self.prefix, first.file)
        if len(spans) == 1:
            with first.filling() as into:
                self.store.read_into(path, first.start, into)
            return
        joined = memoryview(bytearray(last.start + last.num_bytes - first.start))
        self.store.read_into(path, first.start, joined)
        for span in spans:
            begin = span.start - first.start
            with span.filling() as into:
                into[:] = joined[begin : begin + span.num_bytes]


def _is_value(item: WriteItem) -> bool:
    return item.type == WriteItemType.BYTE_IO


def _num_bytes(item: WriteItem) -> int:
    """Of a tensor; a value counts as nothing."""
    if item.tensor_data is None:
        return 0
    return math.prod(item.tensor_data.chunk.sizes) * item.tensor_data.properties.dtype.itemsize


def _pieces(tensor: torch.Tensor) -> Iterator[memoryview]:
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    for piece in flat.split(PIECE_BYTES):
        if len(piece):
            yield memoryview(piece.cpu().numpy())


def _join(prefix: str, name: str) -> str:
    return f"{prefix}/{name}" if prefix else name


@contextmanager
def plain_errors(action: str) -> Iterator[None]:
    """DCP wraps what any rank raised in an exception of its own, traceback and all."""
    try:
        yield
    except CheckpointException as error:
        failures = sorted(error.failures.items())
    else:
        return
    for _, (cause, _) in failures:
        if isinstance(cause, EmbarkError):
            raise cause from None
    rank, (cause, _) = failures[0]
    if str(cause).startswith(("Missing key in checkpoint", "Size mismatch between saved")):
        raise UserError(f"the checkpoint is of another model: {cause}",
                        fix="take the spec that was saved with it, or start a run of another name") from None
    raise Fault(f"rank {rank} could not {action} the checkpoint: {type(cause).__name__}: {cause}",
                fix="start the run again: it resumes from its last committed checkpoint") from cause
