"""How much memory a device has."""

from __future__ import annotations

from typing import TYPE_CHECKING

from embark.run.host_memory import peak_resident_bytes

if TYPE_CHECKING:
    import torch


def device_bytes(device: torch.device) -> int:
    """The GPU's whole memory."""
    import torch

    return int(torch.cuda.get_device_properties(device).total_memory)


def peak_bytes(device: torch.device) -> int:
    """What the run holds of the device, libraries and all; on a CPU, the most that this process has held."""
    if device.type == "cuda":
        import torch

        free, total = torch.cuda.mem_get_info(device)
        return int(total - free)
    return peak_resident_bytes()
