"""Checks GPUs by nvidia-smi: the driver against torch's build, ECC errors, and NVLink."""

import re
import sys
from collections import Counter
from collections.abc import Mapping

from embark.values import frozen
from .host import Check, Checks, Host, check

_FIELDS = ("name", "memory.total", "driver_version", "compute_cap", "ecc.errors.uncorrected.volatile.total")
_FEWER = _FIELDS[:3]  # Fields that old drivers know, too.
_ANSI = re.compile(r"\x1b\[[0-9;]*m")
_CUDA = re.compile(r"CUDA Version:\s*(\d+\.\d+)")
_LINK = re.compile(r"Link \d+:\s*(\S+)")
_JOINED = ("A100-SXM", "H100 80GB HBM3", "H200", "GH200", "B200", "GB200", "B300", "V100-SXM")
"""Parts of the names of GPUs that come joined by NVLink."""


@frozen
class Gpu:
    """A GPU as the driver describes it."""

    name: str
    memory: str
    driver: str
    capability: str  # `9.0`; empty where the driver is too old to say.
    num_ecc_errors: int


def list_gpus(host: Host) -> list[Gpu]:
    """Return the GPUs of this machine; none without a driver."""
    for fields in (_FIELDS, _FEWER):
        answer = host.ask("nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader")
        if answer is not None:
            return [_gpu([cell.strip() for cell in line.split(",")]) for line in answer.splitlines() if line.strip()]
    return []


def check_gpus(host: Host, found: list[Gpu], packages: Mapping[str, str | None]) -> Checks:
    """Check, without torch, what the driver sees, whether the builds match it, and the links."""
    yield _builds(host, found, packages)
    if not found:
        return
    if errors := sum(gpu.num_ecc_errors for gpu in found):
        yield Check("gpu memory", "wrong", f"{errors} uncorrectable ECC errors since boot", "none",
                    "drain this machine and reset it (nvidia-smi --gpu-reset); return it if they come again")
    if len(found) > 1:
        yield links(host, found)


def check_driver(host: Host, built_for: str | None, arches: list[str], found: list[Gpu]) -> Checks:
    """Check the driver and the GPUs against what torch was built for."""
    if not found or built_for is None:
        return
    driver = found[0].driver
    supported = _CUDA.search(host.ask("nvidia-smi") or "")
    if supported:
        have, need = version_of(supported[1]), version_of(built_for)
        text = f"driver {driver}, for CUDA up to {supported[1]}"
        expected = f"CUDA {built_for}, as torch was built for"
        if have[0] < need[0]:
            yield Check("driver", "wrong", text, expected, f"a driver for CUDA {need[0]}, or a torch for {have[0]}")
        else:
            yield check("driver", have >= need, text, expected, "works within one major version; a newer driver is "
                        "safer", bad="warning")
    capabilities = sorted({gpu.capability for gpu in found if gpu.capability})
    missing = [one for one in capabilities if not has_kernels(one, arches)]
    if arches:
        expected = ", ".join(f"sm_{one.replace('.', '')}" for one in capabilities) or "this GPU"
        yield check("gpu kernels", not missing, ", ".join(arches), f"kernels for {expected}",
                    f"another torch: this one has none for {', '.join(missing)}")


def has_kernels(capability: str, arches: list[str]) -> bool:
    """Return whether a GPU can run one of the builds: of the same major version and no higher minor, or any PTX that is
    no newer."""
    major, minor = version_of(capability)
    for arch in arches:
        kind, _, digits = arch.rstrip("af").partition("_")
        if not digits.isdigit():
            continue
        of = (int(digits[:-1]), int(digits[-1]))
        if (kind == "sm" and of[0] == major and of[1] <= minor) or (kind == "compute" and of <= (major, minor)):
            return True
    return False


def links(host: Host, found: list[Gpu]) -> Check:
    """Check how the GPUs of this machine are joined."""
    matrix = host.ask("nvidia-smi", "topo", "-m")
    if matrix is None:
        return Check("gpu links", "warning", "nvidia-smi topo -m fails", "NVLink", "a newer driver")
    kinds = Counter(topology(matrix, len(found)))
    joined = sum(number for kind, number in kinds.items() if kind.startswith("NV"))
    text = ", ".join(f"{kind} ({number} pairs)" for kind, number in kinds.most_common()) or "unknown"
    should_be = any(part in found[0].name for part in _JOINED)
    if joined and joined == sum(kinds.values()):
        states = _LINK.findall(host.ask("nvidia-smi", "nvlink", "--status") or "")
        num_idle = sum("inactive" in state for state in states)
        idle = f"; {num_idle} of {len(states)} links inactive" if num_idle else ""
        return check("gpu links", not num_idle, f"NVLink between all: {text}{idle}", "every link up",
                      "nvidia-smi nvlink --status; is the fabric manager running?", bad="warning")
    fix = "systemctl status nvidia-fabricmanager on the host; without it the GPUs of this kind cannot reach each other"
    return check("gpu links", not should_be, text, "NVLink between all" if should_be else "any", fix, bad="warning")


def topology(matrix: str, num_gpus: int) -> list[str]:
    """Return how each pair of GPUs is joined, from `nvidia-smi topo -m`: `NV18`, `PIX`, `SYS`…"""
    rows = [_ANSI.sub("", line).split() for line in matrix.splitlines()]
    found = []
    for row in rows:
        if row and re.fullmatch(r"GPU\d+", row[0]) and len(row) > num_gpus and "X" in row[1 : num_gpus + 1]:
            index = int(row[0][3:])
            found += row[1 : num_gpus + 1][index + 1 :]
    return found


def _builds(host: Host, found: list[Gpu], packages: Mapping[str, str | None]) -> Check:
    if not found:
        has_driver = host.path("/proc/driver/nvidia/version").exists()
        fix = "a driver is loaded but nvidia-smi sees no GPU: run the container with --gpus all, or reload the driver"
        return check("gpu", not has_driver, "none: training runs on the CPU", "a GPU for the driver that is loaded",
                      fix)
    names = Counter(f"{gpu.name}, {gpu.memory}" for gpu in found)
    text = "; ".join(f"{number} x {name}" for name, number in names.items()) + f"; driver {found[0].driver}"
    torch = packages.get("torch") or ""
    is_cpu_build = torch.endswith("+cpu") or bool(packages.get("fbgemm-gpu-cpu") and not packages.get("fbgemm-gpu"))
    fix = f"{sys.executable} -m embark.stack.versions install --variant cuda"
    return check("gpu", not is_cpu_build, text + ("; torch or fbgemm is a CPU build" if is_cpu_build else ""),
                  "CUDA builds of torch and fbgemm for this GPU", fix)


def _gpu(cells: list[str]) -> Gpu:
    name, memory, driver, capability, errors = (cells + [""] * 5)[:5]
    return Gpu(name, memory, driver, capability if re.fullmatch(r"\d+\.\d+", capability) else "",
               int(errors) if errors.isdigit() else 0)


def version_of(text: str) -> tuple[int, int]:
    """Major and minor version of `9.0` or `12.8`."""
    major, minor = (*map(int, re.findall(r"\d+", text)), 0)[:2]
    return major, minor
