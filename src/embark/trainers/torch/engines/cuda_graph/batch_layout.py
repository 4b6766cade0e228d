"""Batches on their way to the device: packed into pinned memory by a thread, copied while the step before runs; or
drawn on the device itself."""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from embark.data import Batch, Loader, SampleSource
from embark.data.dynamic_ids import NO_ID
from embark.data.loader import RawLoader, Share, num_loader_threads, pooling_weights
from embark.data.prepared.order import TABLE_COLUMNS, num_in_table
from embark.data.prepared.source import PreparedSource, RawBatches
from embark.data.synthetic import EVAL, TRAIN, SyntheticSource
from embark.features.hashing import FIRST, SECOND, STEP
from embark.features.layout import Field
from embark.model.steps import EVAL_SAMPLES, num_together
from embark.spec import ModelSpec, Table
from embark.trainers.torch.batch import RawDecoder, pinned
from embark.trainers.torch.device_samples import DeviceSampler, Samples
from embark.trainers.torch.engines.pipeline import BatchRange
from embark.trainers.torch.networks.sequences import uneven_negatives
from embark.trainers.torch.world import CAPTURED

ALIGNMENT = 64
MAX_IN_FLIGHT = 4  # Raw buffers on their way to the device at a time.


@dataclass(frozen=True)
class HostBuffer:
    """Batches in host memory, and what to call when they have been copied."""

    buffer: Tensor
    release: Any  # Takes the event after which the memory may be used again.
    num_batches: int = 1
    row_order: RowOrder | None = None  # Computes the order of rows on the device if the host did not.
    shape: BatchShape | None = None  # That of a batch with sequences.

    def write(self, slot: Tensor) -> None:
        """Copy the batches into device memory; does not wait."""
        slot[: len(self.buffer)].copy_(self.buffer, non_blocking=True)
        if self.row_order is not None:
            self.row_order(slot)

    def correct(self, slot: Tensor) -> None:
        """Do nothing: batches that the host made are complete."""


@dataclass(frozen=True, slots=True)
class BatchShape:
    """How much room the sequences of one batch have."""

    capacities: tuple[int, ...]  # Rows of each feature that is looked up row by row, or not at all.
    size_bytes: int
    num_predictions: int


@dataclass(frozen=True, slots=True)
class PackedLayout:
    """Label, dense features, then ids feature by feature; a sample with too few ids for its feature is filled up with
    −1."""

    num_samples: int
    num_dense: int
    num_ids: tuple[int, ...]
    num_labels: int = 0  # Labels of each sample; 0: there is one, and no dimension for it.
    extend: Callable[[Batch, int], Batch] | None = None  # Appends samples to the batch of a step.
    weighted: tuple[Table, ...] = ()  # All features, if ids have weights, which then follow the ids.
    is_wide: bool = False
    """Ids have 64 bits, as those of dynamic tables may, and `NO_ID` in place of −1."""

    @property
    def size_bytes(self) -> int:
        return self.starts[-1]

    @property
    def max_batches(self) -> int:
        """Number of batches in one buffer."""
        return 1

    @contextmanager
    def feed(self, source: SampleSource, part: BatchRange, device: torch.device) -> Iterator[Iterator[HostBuffer]]:
        """Yield batches that a loader makes and one more thread packs."""
        with Loader(source, **asdict(part)) as loader:
            extend = self.extend
            batches = loader if extend is None else (
                extend(batch, step) for step, batch in enumerate(loader, part.start_step))
            yield iter(Packer(batches, self, is_pinned=device.type == "cuda"))

    def decode(self, buffer: Tensor, number: int = 0) -> tuple[Tensor, Tensor, Tensor]:
        """Return dense features, ids and label as views."""
        label, dense, ids, *_ = self.starts
        n = self.num_samples
        return (
            buffer[dense : dense + 4 * n * self.num_dense].view(torch.float32).view(n, self.num_dense),
            buffer[ids : ids + self._id_bytes * n * sum(self.num_ids)].view(
                torch.int64 if self.is_wide else torch.int32),
            buffer[label : label + 4 * n * max(1, self.num_labels)].view(torch.float32).view(
                (n, self.num_labels) if self.num_labels else (n,)),
        )

    def factors(self, buffer: Tensor) -> Tensor | None:
        """Return what the row of each id is multiplied by, 0 where there is none; None if ids have no weights."""
        return buffer[self.starts[3] :].view(torch.float32) if self.weighted else None

    def pack(self, batch: Batch, into: NDArray[np.uint8]) -> None:
        """Write `batch` into the buffer `into`."""
        label, dense, ids, factors, _ = self.starts
        n = self.num_samples
        into[label : label + 4 * batch.label.size].view(np.float32)[:] = batch.label.reshape(-1)
        into[dense : dense + 4 * n * self.num_dense].view(np.float32)[:] = batch.dense.reshape(-1)
        to: NDArray[Any] = into[ids : ids + self._id_bytes * n * sum(self.num_ids)].view(
            np.int64 if self.is_wide else np.int32)
        spread(batch.ids, batch.lengths, self.num_ids, to, NO_ID if self.is_wide else -1)
        if self.weighted:
            spread(pooling_weights(batch, self.weighted), batch.lengths, self.num_ids, into[factors:].view(np.float32),
                   0)

    @property
    def starts(self) -> tuple[int, int, int, int, int]:
        """First bytes of label, dense features, ids and their factors, and the size of all."""
        dense = _aligned(4 * self.num_samples * max(1, self.num_labels))
        ids = dense + _aligned(4 * self.num_samples * self.num_dense)
        num_ids = self.num_samples * sum(self.num_ids)
        factors = ids + _aligned(self._id_bytes * num_ids)
        return 0, dense, ids, factors, factors + 4 * num_ids * bool(self.weighted)

    @property
    def _id_bytes(self) -> int:
        return 8 if self.is_wide else 4


def spread(
    values: NDArray[Any], all_lengths: NDArray[np.int32], num_ids: Sequence[int], to: NDArray[Any], missing: int
) -> None:
    """Give each sample room for as many ids of each feature as it may have."""
    if values.size == to.size:
        to[:] = values
        return
    start = at = 0
    for most, lengths in zip(num_ids, all_lengths, strict=True):
        size = len(lengths) * most
        rows = to[at : at + size].reshape(len(lengths), most)
        rows.fill(missing)
        count = int(lengths.sum())
        rows[np.arange(most) < lengths[:, None]] = values[start : start + count]
        start += count
        at += size


class RawLayout:
    """A block of prepared rows as it lies on disk: the host copies bytes, the device makes numbers of them."""

    def __init__(self, source: PreparedSource, names: list[str], num_samples: int, device: torch.device) -> None:
        self.max_batches = num_together(num_samples)
        self._spare_rows = source.spare_rows(self.max_batches * num_samples)
        self._decoder = RawDecoder(source.layout, names, num_samples, device, self.max_batches,
                                   spare_rows=self._spare_rows)
        self.size_bytes = self._decoder.size_bytes
        field = source.layout.row_order(self.max_batches * num_samples, self._spare_rows)
        self._row_order = RowOrder(field, source.block_rows, device) if self._spare_rows else None

    def decode(self, buffer: Tensor, number: int = 0) -> tuple[Tensor, Tensor, Tensor]:
        return self._decoder.decode(buffer, number)

    @contextmanager
    def feed(self, source: Any, part: BatchRange, device: torch.device) -> Iterator[Iterator[HostBuffer]]:
        with RawLoader(source, **asdict(part), allocate=pinned(device), depth=4, num_threads=num_loader_threads(),
                       max_held=MAX_IN_FLIGHT, capacity=self.max_batches, spare_rows=self._spare_rows) as loader:
            yield _released_when_copied(loader, self._row_order)


class DrawnLayout:
    """Packed batches of synthetic samples, drawn by the device where they are read: the host copies nothing."""

    def __init__(self, source: SyntheticSource, packed: PackedLayout, device: torch.device) -> None:
        self.max_batches = num_together(packed.num_samples)
        self.size_bytes = self.max_batches * packed.size_bytes
        self._packed, self.sampler = packed, DeviceSampler(source, device)

    def decode(self, buffer: Tensor, number: int = 0) -> tuple[Tensor, Tensor, Tensor]:
        """Return dense features, ids and label as views."""
        size = self._packed.size_bytes
        return self._packed.decode(buffer[number * size : (number + 1) * size])

    def samples(self, buffer: Tensor, num_batches: int) -> Samples:
        """Return views of the first batches, all together."""
        packed = buffer.view(self.max_batches, self._packed.size_bytes)[:num_batches]
        label, dense, ids, *_ = self._packed.starts
        n, num_dense = self._packed.num_samples, self._packed.num_dense
        return Samples(
            packed[:, dense : dense + 4 * n * num_dense].view(torch.float32).view(num_batches, n, num_dense),
            packed[:, ids : ids + 4 * n * sum(self._packed.num_ids)].view(torch.int32),
            packed[:, label : label + 4 * n].view(torch.float32),
        )

    @contextmanager
    def feed(self, source: SampleSource, part: BatchRange, device: torch.device) -> Iterator[Iterator[DrawnBatches]]:
        share = Share(source.num_train_samples, **asdict(part))
        steps = range(len(share))
        yield (DrawnBatches(self, [share.of(step)[1:] for step in steps[first : first + self.max_batches]])
               for first in range(0, len(share), self.max_batches))

    def call_kernels(self, slot: Tensor) -> None:
        """Draw samples once as a step does, and once as an evaluation does."""
        size = self._packed.num_samples
        DrawnBatches(self, [(0, size)] * self.max_batches).write(slot)
        num_ids = sum(self._packed.num_ids)
        self.sampler.draw(EVAL, [(0, EVAL_SAMPLES)], Samples(
            torch.empty((1, EVAL_SAMPLES, self._packed.num_dense), device=slot.device),
            torch.empty((1, EVAL_SAMPLES * num_ids), dtype=torch.int32, device=slot.device),
            torch.empty((1, EVAL_SAMPLES), device=slot.device)))


class SequenceLayout:
    """Label, dense features, where the sequences of each sample begin, and ids: of pooled features as in
    `PackedLayout`, then, table by table, of features whose rows are looked up one by one, then numbers that are not
    looked up.

    A sequence feature has room for a few more ids than the batch has, with −1 behind them.
    """

    max_batches = 1

    def __init__(self, model: ModelSpec, num_samples: int) -> None:
        self._num_samples, self._num_dense, self._sequence = num_samples, model.num_dense, model.sequence
        self._is_next_item = model.is_next_item
        names = [table.name for table in model.table_list()]
        self.tables = [table for table in model.stored_tables() if table.is_sequence]
        self.unpooled = [feature for table in self.tables for feature in table.features]
        self.unpooled += [feature for feature in model.table_list() if not feature.lookup]
        self.pooled = pooled_tables(model)
        self._pooled_at, self._unpooled_at = ([names.index(feature.name) for feature in features]
                                              for features in (self.pooled, self.unpooled))
        self._num_ids = [feature.multi_hot for feature in self.pooled]
        self.first_id = num_samples * sum(self._num_ids)  # Index of the first id that is not pooled.
        starts = [0, 4 * num_samples, 4 * num_samples * self._num_dense,
                  4 * (num_samples + 1) * sum(feature.is_sequence for feature in self.unpooled)]
        _, self._dense_start, self._offsets_start, self._ids_start = accumulate(map(_aligned, starts))
        self.size_bytes = self._size_of([num_samples * feature.multi_hot for feature in self.unpooled])
        self.capacities: tuple[int, ...] = self.some_room
        """Room of the batch that is decoded."""

    @property
    def some_room(self) -> tuple[int, ...]:
        """Room for some rows of each feature, in which a step can be tried."""
        n = self._num_samples
        return tuple(n if self._has_fixed_room(one) else min(4096, n * one.multi_hot) for one in self.unpooled)

    def larger(self, capacities: Sequence[int]) -> tuple[int, ...]:
        """Return the room of a batch with a quarter more rows."""
        return tuple(room if self._has_fixed_room(one) else
                     min(capacity_of(room * 5 // 4), self._num_samples * one.multi_hot)
                     for one, room in zip(self.unpooled, capacities, strict=True))

    def _has_fixed_room(self, feature: Table) -> bool:
        """Return whether each sample has as many ids as any other."""
        return not feature.is_sequence or feature.name == self._sequence.negatives

    @contextmanager
    def feed(self, source: SampleSource, part: BatchRange, device: torch.device) -> Iterator[Iterator[HostBuffer]]:
        """Yield batches that a loader makes and one more thread packs."""
        with Loader(source, **asdict(part)) as loader:
            yield iter(Packer(loader, self, is_pinned=device.type == "cuda"))

    def decode(self, buffer: Tensor, number: int = 0) -> tuple[Tensor, Tensor, Tensor]:
        """Return dense features, all ids and label as views."""
        n, dense = self._num_samples, self._dense_start
        return (
            buffer[dense : dense + 4 * n * self._num_dense].view(torch.float32).view(n, self._num_dense),
            buffer[self._ids_start : self._size_of(self.capacities)].view(torch.int32),
            buffer[: 4 * n].view(torch.float32),
        )

    def offsets(self, buffer: Tensor) -> dict[str, Tensor]:
        """Return where the rows of each sample begin, and the end, of each sequence, as views."""
        sequences, size = [one.name for one in self.unpooled if one.is_sequence], self._num_samples + 1
        found = buffer[self._offsets_start : self._offsets_start + 4 * size * len(sequences)].view(torch.int32)
        return dict(zip(sequences, found.view(-1, size), strict=True))

    def spans(self) -> list[slice]:
        """Return where the ids of each feature in `unpooled` are among all ids."""
        ends = list(accumulate(self.capacities, initial=self.first_id))
        return [slice(start, end) for start, end in pairwise(ends)]

    def table_spans(self) -> list[slice]:
        """Return where the ids of each table in `tables` are among all ids: those of all of its features."""
        spans = iter(self.spans())
        of_tables = [[next(spans) for _ in table.features] for table in self.tables]
        return [slice(own[0].start, own[-1].stop) for own in of_tables]

    def pack(self, batch: Batch, into: NDArray[np.uint8]) -> BatchShape:
        """Write `batch` into the buffer `into`."""
        n = num_predictions = self._num_samples
        by_feature, capacities = batch.by_feature(batch.ids), list[int]()
        into[: 4 * n].view(np.float32)[:] = batch.label
        into[self._dense_start : self._dense_start + batch.dense.nbytes].view(np.float32)[:] = batch.dense.reshape(-1)
        ids: NDArray[np.int32] = into[self._ids_start :].view(np.int32)
        spread(np.concatenate([by_feature[at] for at in self._pooled_at] or [batch.ids[:0]]),
               batch.lengths[self._pooled_at], self._num_ids, ids[: self.first_id], -1)
        offsets, end = into[self._offsets_start : self._ids_start].view(np.int32), self.first_id
        for feature, at in zip(self.unpooled, self._unpooled_at, strict=True):
            values, lengths = by_feature[at], batch.lengths[at]
            is_even = bool((lengths == lengths[0]).all())
            if feature.name == self._sequence.negatives and not (is_even or self._sequence.share_negatives):
                raise uneven_negatives(feature.name)
            if feature.name == self._sequence.history and self._is_next_item:
                num_predictions = int(np.maximum(lengths - 1, 0).sum())
            if not feature.is_sequence:
                capacities.append(n)
                spread(values, lengths[None], [1], ids[end : end + n], -1)
            else:
                is_exact = is_even and feature.name == self._sequence.negatives
                capacities.append(len(values) if is_exact else min(capacity_of(len(values)), n * feature.multi_hot))
                offsets[0] = 0
                np.cumsum(lengths, out=offsets[1 : n + 1])
                offsets = offsets[n + 1 :]
                ids[end : end + len(values)] = values
                ids[end + len(values) : end + capacities[-1]] = -1
            end += capacities[-1]
        return BatchShape(tuple(capacities), self._size_of(capacities), num_predictions)

    def _size_of(self, capacities: Sequence[int]) -> int:
        return self._ids_start + 4 * (self.first_id + sum(capacities))


class DrawnBatches:
    """Batches that the device has yet to draw."""

    def __init__(self, layout: DrawnLayout, spans: list[tuple[int, int]]) -> None:
        self._layout, self._spans, self.num_batches = layout, spans, len(spans)
        self._drawn: Any = None  # The event after which they are there.

    def write(self, slot: Tensor) -> None:
        """Draw the batches into device memory; does not wait."""
        samples = self._layout.samples(slot, self.num_batches)
        self._is_uncertain, _ = self._layout.sampler.draw(TRAIN, self._spans, samples)
        self._has_uncertain = torch.empty((), dtype=torch.bool, pin_memory=slot.is_cuda)
        self._has_uncertain.copy_(self._is_uncertain.any(), non_blocking=True)

    def release(self, event: Any) -> None:
        self._drawn = event

    def correct(self, slot: Tensor) -> None:
        """Let the host draw what the device could not decide, once the batches are drawn."""
        if self._drawn is not None:
            self._drawn.synchronize()
        if self._has_uncertain:
            self._layout.sampler.correct(TRAIN, self._spans, self._layout.samples(slot, self.num_batches),
                                         self._is_uncertain)


BatchLayout = PackedLayout | RawLayout | DrawnLayout | SequenceLayout
"""How batches lie in one buffer, and what turns it into dense [B, num_dense], ids [all] and label [B] on the device."""
BatchBuffer = HostBuffer | DrawnBatches


def pooled_tables(model: ModelSpec) -> list[Table]:
    """Return the features whose rows are pooled."""
    unpooled = {table.name for table in model.stored_tables() if table.is_sequence}
    return [table for table in model.table_list() if table.lookup and table.weights not in unpooled]


def capacity_of(num_rows: int) -> int:
    """Return the room that so many rows get: few sizes, from 512 on each at most an eighth larger than the one
    before."""
    step = max(64, 1 << max(0, num_rows.bit_length() - 4))
    return max(1, -(-num_rows // step)) * step


def _released_when_copied(loader: RawLoader, row_order: RowOrder | None) -> Iterator[HostBuffer]:
    copied: deque[tuple[RawBatches, Any]] = deque()
    for batches in loader:
        yield HostBuffer(torch.from_numpy(batches.buffer), lambda event, done=batches: copied.append((done, event)),
                         batches.num_batches, row_order)
        while copied and (len(copied) >= MAX_IN_FLIGHT - 1 or copied[0][1] is None or copied[0][1].query()):
            done, event = copied.popleft()
            if event is not None:
                event.synchronize()
            loader.release(done)


class Packer:
    """A thread that packs batches into a ring of host buffers, pinned where the device is a GPU."""

    def __init__(
        self, batches: Iterable[Batch], layout: PackedLayout | SequenceLayout, *, is_pinned: bool, depth: int = 4
    ) -> None:
        self._batches, self._layout = batches, layout
        self._free: queue.SimpleQueue[tuple[Tensor, Any]] = queue.SimpleQueue()
        for _ in range(depth):
            self._free.put((torch.empty(layout.size_bytes, dtype=torch.uint8, pin_memory=is_pinned), None))
        self._full: queue.SimpleQueue[HostBuffer | BaseException | None] = queue.SimpleQueue()

    def __iter__(self) -> Iterator[HostBuffer]:
        threading.Thread(target=self._run, name="embark-packer", daemon=True).start()
        while (got := self._full.get()) is not None:
            if isinstance(got, BaseException):
                raise got
            yield got

    def _run(self) -> None:
        try:
            for batch in self._batches:
                buffer, event = self._free.get()
                if event is not None:
                    event.synchronize()
                shape = self._layout.pack(batch, buffer.numpy())
                self._full.put(HostBuffer(buffer[: shape.size_bytes] if shape else buffer,
                                          lambda event, buffer=buffer: self._free.put((buffer, event)), shape=shape))
            self._full.put(None)
        except BaseException as error:
            self._full.put(error)


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


class RowOrder:
    """Replaces a table of blocks, `order.block_table`, by the index of each row in the buffer; waits for nothing.

    One graph for each buffer: some thirty launches, one by one, would take the host longer than a step.
    """

    def __init__(self, field: Field, block_rows: int, device: torch.device) -> None:
        self._field, self._block_rows = field, block_rows
        self._num_blocks = num_in_table(field.shape[0], block_rows)
        self._numbers = torch.arange(block_rows, device=device)
        self._samples = torch.arange(field.shape[0], device=device)
        self._graphs: dict[int, torch.cuda.CUDAGraph | None] = {}  # Graphs by the buffer's address.

    def __call__(self, buffer: Tensor) -> None:
        address = buffer.data_ptr()
        if not buffer.is_cuda or address not in self._graphs:  # the first call loads what a capture must not
            self._graphs[address] = None
            self._find(buffer)
            return
        graph = self._graphs[address]
        if graph is None:
            graph = self._graphs[address] = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                self._find(buffer)
            CAPTURED.add(graph)
        graph.replay()

    def _find(self, buffer: Tensor) -> None:
        field, numbers = self._field, self._numbers
        region = buffer[field.start : field.start + field.size_bytes]
        table = region[: 8 * TABLE_COLUMNS * self._num_blocks].view(torch.int64).view(-1, TABLE_COLUMNS)
        key, low, rows, at, first, stop = table.unbind(1)
        bits = numbers * _signed(STEP) + key[:, None]
        bits = (bits ^ (bits >> 30 & (1 << 34) - 1)) * _signed(FIRST)
        bits = (bits ^ (bits >> 27 & (1 << 37) - 1)) * _signed(SECOND)
        bits = bits ^ (bits >> 31 & (1 << 33) - 1)
        bits = (bits & ~low[:, None] | numbers) ^ torch.iinfo(torch.int64).min  # sorted as if they had no sign
        bits = torch.where(numbers < rows[:, None], bits, torch.iinfo(torch.int64).max)
        order = bits.sort(1).values & low[:, None]
        block = torch.searchsorted(stop.contiguous(), self._samples, right=True).clamp_(max=self._num_blocks - 1)
        start = torch.nn.functional.pad(stop[:-1], (1, 0))
        place = self._samples + (first - start)[block]
        shuffled = order.view(-1)[(block * self._block_rows + place).clamp_(0, order.numel() - 1)]
        region.view(torch.int32).copy_(torch.where(rows[block] > 0, shuffled, place) + at[block])


def _signed(bits: int) -> int:
    return bits - (1 << 64) if bits >> 63 else bits
