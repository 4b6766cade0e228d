"""What `train.precision = "auto"` means, and which devices have matrix units for bf16."""

from pathlib import Path

from embark.spec import TrainSpec


def choose_precision(train: TrainSpec, *, has_matrix_bf16: bool) -> str:
    """`fp32`, `tf32` or `bf16`; `auto` takes bf16 where matrix units make it faster."""
    if train.precision != "auto":
        return train.precision
    return "bf16" if has_matrix_bf16 else "fp32"


def cpu_has_matrix_bf16(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """AMX. The vector instructions of avx512_bf16 are no matrix units."""
    try:
        return "amx_bf16" in cpuinfo.read_text()
    except OSError:
        return False


def gpu_has_matrix_bf16(capability: tuple[int, int]) -> bool:
    """NVIDIA's, since Ampere."""
    return capability >= (8, 0)
