"""Batches on their way to the device: packed into pinned memory by a thread, copied while the step before runs; or
drawn on the device itself."""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
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
from embark.spec import Table
from embark.trainers.torch.batch import RawDecoder, pinned
from embark.trainers.torch.device_samples import DeviceSampler, Samples
from embark.trainers.torch.engines.pipeline import BatchRange
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

    def write(self, slot: Tensor) -> None:
        """Copy the batches into device memory; does not wait."""
        slot.copy_(self.buffer, non_blocking=True)
        if self.row_order is not None:
            self.row_order(slot)

    def correct(self, slot: Tensor) -> None:
        """Do nothing: batches that the host made are complete."""


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
        self._spread(batch.ids, batch, to, NO_ID if self.is_wide else -1)
        if self.weighted:
            self._spread(pooling_weights(batch, self.weighted), batch, into[factors:].view(np.float32), 0)

    def _spread(self, values: NDArray[Any], batch: Batch, to: NDArray[Any], missing: int) -> None:
        """Give each sample room for as many ids as it may have."""
        if values.size == to.size:
            to[:] = values
            return
        start = at = 0
        for most, lengths in zip(self.num_ids, batch.lengths, strict=True):
            rows = to[at : at + self.num_samples * most].reshape(self.num_samples, most)
            rows.fill(missing)
            count = int(lengths.sum())
            rows[np.arange(most) < lengths[:, None]] = values[start : start + count]
            start += count
            at += self.num_samples * most

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


BatchLayout = PackedLayout | RawLayout | DrawnLayout
"""How batches lie in one buffer, and what turns it into dense [B, num_dense], ids [all] and label [B] on the device."""
BatchBuffer = HostBuffer | DrawnBatches


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

    def __init__(self, batches: Iterable[Batch], layout: PackedLayout, *, is_pinned: bool, depth: int = 4) -> None:
        self._batches, self._layout = batches, layout
        self._free: queue.SimpleQueue[tuple[Tensor, Any]] = queue.SimpleQueue()
        for _ in range(depth):
            self._free.put((torch.empty(layout.size_bytes, dtype=torch.uint8, pin_memory=is_pinned), None))
        self._full: queue.SimpleQueue[Tensor | BaseException | None] = queue.SimpleQueue()

    def __iter__(self) -> Iterator[HostBuffer]:
        threading.Thread(target=self._run, name="embark-packer", daemon=True).start()
        while (got := self._full.get()) is not None:
            if isinstance(got, BaseException):
                raise got
            yield HostBuffer(got, lambda event, buffer=got: self._free.put((buffer, event)))

    def _run(self) -> None:
        try:
            for batch in self._batches:
                buffer, event = self._free.get()
                if event is not None:
                    event.synchronize()
                self._layout.pack(batch, buffer.numpy())
                self._full.put(buffer)
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
