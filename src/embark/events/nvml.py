"""What NVIDIA's driver says of the GPUs: its own library, asked through ctypes, since the driver brings it along."""

from __future__ import annotations

import ctypes
import os
from types import TracebackType
from typing import Any, Self

LIBRARY = "libnvidia-ml.so.1"
TEMPERATURE_OF_THE_GPU = 0
NAME_BYTES = 96


class _Utilization(ctypes.Structure):
    _fields_ = (("gpu", ctypes.c_uint), ("memory", ctypes.c_uint))


class _Memory(ctypes.Structure):
    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


class Nvml:
    """The GPUs that the run may use; none where there is no driver. What a GPU does not tell is left out."""

    def __init__(self, library: str = LIBRARY) -> None:
        self._library = library
        self._nvml: ctypes.CDLL | None = None
        self._handles: list[tuple[int, ctypes.c_void_p]] = []

    def __enter__(self) -> Self:
        try:
            nvml = ctypes.CDLL(self._library)
            if nvml.nvmlInit_v2() == 0:
                self._nvml = nvml
                self._handles = self._find()
        except (OSError, AttributeError):  # no such library, or one that is too old
            self._nvml = None
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._nvml is not None:
            self._nvml.nvmlShutdown()
            self._nvml = None

    def gpus(self) -> list[dict[str, Any]]:
        """One row a GPU."""
        return [{"index": index, **self._row(handle)} for index, handle in self._handles] if self._nvml else []

    def _row(self, handle: ctypes.c_void_p) -> dict[str, float]:
        row: dict[str, float] = {}
        share, memory = _Utilization(), _Memory()
        power_mw, temperature_c = ctypes.c_uint(), ctypes.c_uint()
        if self._got("nvmlDeviceGetUtilizationRates", handle, ctypes.byref(share)):
            row["util_percent"] = float(share.gpu)
        if self._got("nvmlDeviceGetMemoryInfo", handle, ctypes.byref(memory)):
            row["used_bytes"], row["total_bytes"] = memory.used, memory.total
        if self._got("nvmlDeviceGetPowerUsage", handle, ctypes.byref(power_mw)):
            row["power_w"] = power_mw.value / 1000
        if self._got("nvmlDeviceGetTemperature", handle, TEMPERATURE_OF_THE_GPU, ctypes.byref(temperature_c)):
            row["temperature_c"] = float(temperature_c.value)
        return row

    def _find(self) -> list[tuple[int, ctypes.c_void_p]]:
        """CUDA_VISIBLE_DEVICES is CUDA's, and NVML does not know of it. The index is the one nvidia-smi shows."""
        count = ctypes.c_uint()
        if not self._got("nvmlDeviceGetCount_v2", ctypes.byref(count)):
            return []
        wanted = [word.strip() for word in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if word.strip()]
        found = []
        for index in range(count.value):
            handle = ctypes.c_void_p()
            if not self._got("nvmlDeviceGetHandleByIndex_v2", index, ctypes.byref(handle)):
                continue
            if not wanted or str(index) in wanted or self._has_uuid(handle, wanted):
                found.append((index, handle))
        return found

    def _has_uuid(self, handle: ctypes.c_void_p, wanted: list[str]) -> bool:
        if not any(word.startswith("GPU-") for word in wanted):
            return False
        name = ctypes.create_string_buffer(NAME_BYTES)
        if not self._got("nvmlDeviceGetUUID", handle, name, NAME_BYTES):
            return False
        uuid = name.value.decode(errors="replace")
        return any(word.startswith("GPU-") and uuid.startswith(word) for word in wanted)

    def _got(self, function: str, *arguments: Any) -> bool:
        """Whether NVML answered: every function returns 0 then."""
        try:
            return bool(getattr(self._nvml, function)(*arguments) == 0)
        except AttributeError:
            return False
