"""What the dense layers compute in."""

from pathlib import Path

import torch

from embark.spec import TrainSpec


def choose_precision(train: TrainSpec, device: torch.device) -> str:
    """`fp32`, `tf32` or `bf16`; `auto` takes bf16 where matrix units make it faster."""
    if train.precision != "auto":
        return train.precision
    if device.type == "cuda":
        return "bf16" if torch.cuda.get_device_capability(device) >= (8, 0) else "fp32"
    return "bf16" if has_amx() else "fp32"


def set_matmul_precision(precision: str) -> None:
    """Let fp32 matrix products use TF32, or forbid it."""
    torch.set_float32_matmul_precision("highest" if precision == "fp32" else "high")


def has_amx(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """The CPU has matrix units for bf16."""
    try:
        return "amx_bf16" in cpuinfo.read_text()
    except OSError:
        return False
