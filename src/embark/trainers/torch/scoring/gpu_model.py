"""An exported model on a GPU: one CUDA graph for each size of batch, one copy in and one copy out."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from embark.data.prepared import Rows
from embark.export.artifact import Artifact
from embark.export.delta import DELTA
from embark.export.safetensors_file import map_file
from embark.features.rows import NumberRows, RawRows
from embark.formatting import to_one_line
from embark.spec.serve import Precision
from .cpu_model import load_network, positions_of
from .gpu_layers import fuse_layers
from .gpu_tables import GpuTables, check_memory

MAX_BATCH_ROWS = 16_384
MIN_BATCH_ROWS = 16  # Smaller batches take no less time.
_MAX_INPUT_BYTES = 256 << 20  # Limit of a batch; long lists make it smaller.
_NUM_SLOTS = 2  # One is filled while the GPU works on the other.
_log = logging.getLogger("embark.serve")


def buckets(max_batch_rows: int) -> list[int]:
    """Return the sizes of batches that have a graph: powers of two up to the first that holds `max_batch_rows`."""
    found = [MIN_BATCH_ROWS]
    while found[-1] < max_batch_rows:
        found.append(2 * found[-1])
    return found


class GpuModel:
    """The network of an artifact on a GPU. Callers use it like `ExportedModel`; any thread may call it."""

    def __init__(self, artifact: Artifact, model_file: str = "", *, precision: Precision = "tf32",
                 max_batch_rows: int = MAX_BATCH_ROWS, device: str = "cuda") -> None:
        """`model_file` is the code of a custom model. With `device` "cpu" the same steps run on the CPU,
        with kernels in Triton's interpreter where `TRITON_INTERPRET` is set."""
        self._device, self._artifact, self._precision = torch.device(device), artifact, precision
        self._identities = artifact.identities  # What its tables hold: the artifact forgets it when its arrays change.
        self._is_gpu = self._device.type == "cuda"
        self.device_name = _device_name(self._device)
        network = load_network(artifact, artifact.model_with_code(model_file))
        if self._is_gpu:
            check_memory(artifact, _free_bytes(), self.device_name)
        self._network, self._pooled_dtype = self._fused(network)
        self._tables = GpuTables(artifact, self._device)
        self._matmul_precision = "highest" if precision == "fp32" else "high"
        layout = artifact.info.rows.layout
        positions = positions_of(artifact)
        self._positions = [positions[table.name] for table in artifact.info.model.table_list()]
        self._in_order = self._positions == list(range(len(layout.features)))
        self._num_dense, self._num_cells = len(layout.dense), len(layout.dense) + sum(self._tables.num_ids)
        self._buckets = buckets(min(max_batch_rows, _MAX_INPUT_BYTES // (4 * self._num_cells)))
        self._lock = threading.Lock()
        self._input = torch.zeros(self._buckets[-1] * self._num_cells, dtype=torch.int32, device=self._device)
        self._output = torch.zeros(self._buckets[-1], device=self._device)
        self._slots = [_Slot(self) for _ in range(_NUM_SLOTS)]
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self.not_captured = ""
        """Why the forward pass runs without graphs; empty where it has them."""
        if self._is_gpu:
            self._stream = torch.cuda.Stream(self._device)
            self._stream.wait_stream(torch.cuda.current_stream(self._device))  # which wrote the weights
            self._capture()

    @property
    def device(self) -> str:
        """The device and the method of scoring, for people to read."""
        if not self._is_gpu:
            return self.device_name
        return f"{self.device_name}, " + (f"without CUDA graphs: {self.not_captured}" if self.not_captured else
                                          f"CUDA graphs for up to {self._buckets[-1]:,} rows")

    @property
    def is_quick(self) -> bool:
        """Whether a batch takes less than a millisecond, as graphs do."""
        return bool(self._graphs)

    def score(self, raw: RawRows) -> NDArray[np.float32]:
        """Return the probability of the label of each row; `raw` must be `readable`."""
        return self.score_encoded(self._artifact.encoder.encode(raw))

    def advance(self, artifact: Artifact, model_file: str = "") -> bool:
        """Become the artifact by the deltas since the present one; returns False if it is no later version of it.

        Rows and weights are written over the old ones, and no graph is captured again. Nobody may score meanwhile. A
        model that fails here must not be used any more.
        """
        before, num_known = self._artifact.info, len(self._identities)
        if not num_known or artifact.identities[:num_known] != self._identities or \
                artifact.info.rows.layout != before.rows.layout or artifact.info.model != before.model:
            return False
        self._identities = ()  # until all of it is written
        fresh, _ = self._fused(load_network(artifact, artifact.model_with_code(model_file)))
        with self._lock, torch.inference_mode():
            for folder in artifact.deltas[num_known - 1 :]:
                self._tables.apply(map_file(folder / DELTA))
            for weight, value in zip(self._network.state_dict().values(), fresh.state_dict().values(), strict=True):
                weight.copy_(value)
            self._artifact, self._identities = artifact, artifact.identities
        if self._is_gpu:  # the model's own stream reads what this one wrote
            torch.cuda.current_stream(self._device).synchronize()
        return True

    def _fused(self, network: nn.Module) -> tuple[nn.Module, torch.dtype]:
        """Return the network on the device, and the type of the pooled rows that it takes."""
        network = network.to(self._device)
        return network, fuse_layers(network, self._precision)

    def score_encoded(self, rows: Rows) -> NDArray[np.float32]:
        """Return the scores of rows with ids; more than the largest graph takes are scored in parts."""
        return self._score_parts(len(rows), lambda slot, start, stop: self.fill(
            slot, rows if len(rows) == stop - start else rows.cut(start, stop)))

    def score_numbers(self, several: Sequence[NumberRows]) -> NDArray[np.float32]:
        """Return the scores of the rows of several requests, with ids."""
        if any(num_ids != 1 for num_ids in self._tables.num_ids):
            return self.score_encoded(NumberRows.join(several).to_rows())
        num_rows = sum(map(len, several))
        if num_rows > self._buckets[-1]:
            several = [NumberRows.join(several)]
        return self._score_parts(num_rows, lambda slot, start, stop: self.fill_numbers(
            slot, several if num_rows == stop - start else [several[0].cut(start, stop)]))

    def _score_parts(self, num_rows: int, fill: Callable[[_Slot, int, int], int]) -> NDArray[np.float32]:
        found, most = np.empty(num_rows, np.float32), self._buckets[-1]
        with self._lock, torch.inference_mode():
            for number, start in enumerate(range(0, num_rows, most)):
                slot, stop = self._slots[number % _NUM_SLOTS], min(start + most, num_rows)
                slot.finish()
                bucket = fill(slot, start, stop)
                self.launch(slot, bucket, found[start:stop])
            for slot in self._slots:
                slot.finish()
        return found

    def user_vectors(self, raw: RawRows) -> NDArray[np.float32]:
        raise NotImplementedError("retrieval models are scored on the CPU")

    def fill(self, slot: _Slot, rows: Rows) -> int:
        """Write rows into memory that the GPU copies from; returns the size of the batch.

        Rows of earlier batches remain behind them: the scores of those are not read.
        """
        num_rows = len(rows)
        bucket = next(size for size in self._buckets if size >= num_rows)
        cells, first = slot.cells, bucket * self._num_dense
        cells[:first].view(np.float32).reshape(bucket, -1)[:num_rows] = rows.dense
        for position, num_ids in zip(self._positions, self._tables.num_ids, strict=True):
            to = cells[first : first + bucket * num_ids].reshape(bucket, num_ids)[:num_rows]
            ids, lengths = rows.ids[position], rows.lengths[position]
            if lengths is None:
                own = ids.reshape(num_rows, -1)
                to[:, : own.shape[1]] = own
                to[:, own.shape[1] :] = -1
            else:
                to[:] = -1
                to[np.arange(num_ids) < lengths[:, None]] = ids
            first += bucket * num_ids
        return bucket

    def fill_numbers(self, slot: _Slot, several: Sequence[NumberRows]) -> int:
        """Write rows that have one id of each table, all tables at once."""
        num_rows = sum(map(len, several))
        bucket = next(size for size in self._buckets if size >= num_rows)
        first, at = bucket * self._num_dense, 0
        dense = slot.cells[:first].view(np.float32).reshape(bucket, -1)
        ids = slot.cells[first : bucket * self._num_cells].reshape(-1, bucket)
        for rows in several:
            dense[at : at + len(rows)] = rows.dense
            ids[:, at : at + len(rows)] = rows.ids if self._in_order else rows.ids[self._positions]
            at += len(rows)
        return bucket

    def launch(self, slot: _Slot, bucket: int, to: NDArray[np.float32]) -> None:
        """Score a batch; its scores are in `to` once the slot is finished."""
        num_cells = bucket * self._num_cells
        with torch.cuda.stream(self._stream) if self._is_gpu else nullcontext():
            self._input[:num_cells].copy_(slot.input[:num_cells], non_blocking=True)
            if bucket in self._graphs:
                self._graphs[bucket].replay()
            else:
                self._step(bucket)
            slot.output[: len(to)].copy_(self._output[: len(to)], non_blocking=True)
            slot.start(to)

    def _step(self, bucket: int) -> None:
        first = bucket * self._num_dense
        dense = self._input[:first].view(torch.float32).view(bucket, self._num_dense)
        ids = self._input[first : bucket * self._num_cells]
        before = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision(self._matmul_precision)
        try:
            pooled = torch.empty(bucket, self._tables.width, dtype=self._pooled_dtype, device=self._device)
            self._tables.look_up(ids, pooled)
            # A custom network is in bf16 by autocast, without its cache, which would hold graphs' memory.
            is_cast = self._precision == "bf16" and self._pooled_dtype == torch.float32
            with torch.autocast(self._device.type, torch.bfloat16, enabled=is_cast, cache_enabled=False):
                logits = self._network(dense, pooled).float()
            self._output[:bucket] = logits.sigmoid()
        finally:
            torch.set_float32_matmul_precision(before)

    def _capture(self) -> None:
        """Capture the largest batch first, so that the others' memory lies in its.

        Other threads may use the GPU meanwhile: another version answers on it.
        """
        graphs, pool = {}, None
        with torch.inference_mode():
            for bucket in reversed(self._buckets):
                with torch.cuda.stream(self._stream):
                    for _ in range(2):  # Compiles kernels, and gives libraries their memory.
                        self._step(bucket)
                self._stream.synchronize()
                try:
                    graphs[bucket] = graph = torch.cuda.CUDAGraph()
                    self._record(graph, bucket, pool)
                except Exception as error:  # it ran before: so it cannot be captured
                    self.not_captured = to_one_line(str(error).strip().partition("\n")[0])
                    _log.warning("the model cannot be captured in a CUDA graph and runs slower without: %s",
                                 self.not_captured)
                    self._stream = torch.cuda.Stream(self._device)
                    return
                pool = graph.pool()
        self._graphs = graphs

    def _record(self, graph: torch.cuda.CUDAGraph, bucket: int, pool: Any) -> None:
        with torch.cuda.stream(self._stream):
            graph.capture_begin(*([pool] if pool else []), capture_error_mode="thread_local")
            try:
                self._step(bucket)
            except Exception:
                with suppress(RuntimeError):  # says only that there was an error before
                    graph.capture_end()
                raise
            graph.capture_end()


class _Slot:
    """Memory of the host for a batch and its scores, which the GPU reads and writes by itself."""

    def __init__(self, model: GpuModel) -> None:
        is_pinned = model._is_gpu
        self.input = torch.zeros(len(model._input), dtype=torch.int32, pin_memory=is_pinned)
        self.output = torch.zeros(len(model._output), pin_memory=is_pinned)
        self.cells: NDArray[np.int32] = self.input.numpy()
        self._event = torch.cuda.Event() if is_pinned else None
        self._to: NDArray[np.float32] | None = None

    def start(self, to: NDArray[np.float32]) -> None:
        """Record that the work on its batch was queued."""
        self._to = to
        if self._event is not None:
            self._event.record()

    def finish(self) -> None:
        """Wait for the scores, if it has any, and hand them over."""
        if self._to is None:
            return
        if self._event is not None:
            self._event.synchronize()
        self._to[:] = self.output[: len(self._to)].numpy()
        self._to = None


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


def _free_bytes() -> int:
    """Return the free bytes, with those that torch holds of versions that no longer answer."""
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info()
    return free + torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
