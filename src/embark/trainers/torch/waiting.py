"""How long training stood still for want of a batch."""

import time
from collections import deque
from collections.abc import Iterator
from typing import Any

import torch

LOOKED_AT_S = 50e-6
"""A shorter wait of the host is none."""
MAX_PENDING = 1024
INPUT_NAME = "embark::input"


class InputWaits:
    """Counts the seconds in which there was no batch.

    On a CPU that is the time `next` took, under a name that a profile shows. A GPU works while the host waits, most
    often for the GPU itself to give a buffer back; there only the gap counts that the wait left in the GPU's own
    stream.
    """

    def __init__(self, device: torch.device) -> None:
        self._total_s = 0.0
        self._gaps = _DeviceGaps(device) if device.type == "cuda" else None

    def timed(self, batches: Iterator[Any]) -> Iterator[Any]:
        return _Timed(batches, self)

    def total_s(self) -> float:
        """So far. On a GPU, of the steps that are done."""
        if self._gaps is not None:
            self._total_s += self._gaps.take_done_s()
        return self._total_s

    def next_of(self, batches: Iterator[Any]) -> Any:
        if self._gaps is not None:
            self._gaps.begin()
        began = time.perf_counter()
        batch = _named(batches) if torch.autograd._profiler_enabled() else next(batches)
        waited_s = time.perf_counter() - began
        if self._gaps is None:
            self._total_s += waited_s
        elif waited_s > LOOKED_AT_S:
            self._gaps.end()
        return batch


class _Timed:
    """One object for the whole run: TorchRec's pipeline tells data by the iterator it comes from."""

    def __init__(self, batches: Iterator[Any], wait: InputWaits) -> None:
        self._batches, self._wait = batches, wait

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        return self._wait.next_of(self._batches)


def _named(batches: Iterator[Any]) -> Any:
    """Under a name that a profile shows; without one that would cost more than all the rest here."""
    with torch.autograd.profiler.record_function(INPUT_NAME):
        return next(batches)


class _DeviceGaps:
    """Two events side by side in the stream that trains: where it ran dry in between, they are as far apart."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.current_stream(device)
        self._free: list[Any] = []
        self._begun: Any = None
        self._pending: deque[tuple[Any, Any]] = deque()

    def begin(self) -> None:
        if self._begun is None:
            self._begun = self._free.pop() if self._free else torch.cuda.Event(enable_timing=True)
        self._begun.record(self._stream)

    def end(self) -> None:
        ended = self._free.pop() if self._free else torch.cuda.Event(enable_timing=True)
        ended.record(self._stream)
        if len(self._pending) >= MAX_PENDING:
            self._free += self._pending.popleft()
        self._pending.append((self._begun, ended))
        self._begun = None

    def take_done_s(self) -> float:
        """Never waits for the device."""
        total_s = 0.0
        while self._pending and self._pending[0][1].query():
            begun, ended = self._pending.popleft()
            total_s += begun.elapsed_time(ended) / 1000
            self._free += (begun, ended)
        return total_s
