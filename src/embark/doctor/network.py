"""The network between machines: EFA and InfiniBand, and what NCCL needs to use them."""

import resource
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from embark.doctor.check import Check, check
from embark.doctor.host import Host

_AMAZON = "0x1d0f"
_PLUGIN_FOLDERS = ("/opt/amazon/ofi-nccl", "/opt/aws-ofi-nccl", "/opt/amazon/efa", "/usr/lib/x86_64-linux-gnu",
                   "/usr/local/lib")


@dataclass(frozen=True, slots=True)
class Port:
    """One device of /sys/class/infiniband, by its first port."""

    name: str
    kind: str
    """`EFA`, `InfiniBand` or `RoCE`."""
    rate: str
    """`400 Gb/sec`; empty where it does not say."""
    is_up: bool


def check_network(host: Host) -> Iterator[Check]:
    ports = devices(host)
    yield _fabric(host, ports)
    if any(port.kind == "EFA" for port in ports):
        yield _libfabric(host)
        yield _plugin(host)
    yield _locked_memory(bool(ports))


def devices(host: Host) -> list[Port]:
    folder = host.path("/sys/class/infiniband")
    names = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    return [_port(host, name) for name in names]


def _port(host: Host, name: str) -> Port:
    base = f"/sys/class/infiniband/{name}"
    link, driver = host.path(f"{base}/device/driver"), ""
    if link.is_symlink() or link.exists():
        driver = Path(str(link.readlink() if link.is_symlink() else link)).name
    is_efa = host.read(f"{base}/device/vendor").strip() == _AMAZON or driver == "efa" or name.startswith("efa")
    layer = host.read(f"{base}/ports/1/link_layer").strip()
    kind = "EFA" if is_efa else "RoCE" if layer == "Ethernet" else "InfiniBand"
    state = host.read(f"{base}/ports/1/state")
    rate = host.read(f"{base}/ports/1/rate").partition("(")[0].strip()
    return Port(name, kind, rate, "ACTIVE" in state or (is_efa and not state))


def _fabric(host: Host, ports: list[Port]) -> Check:
    if not ports:
        return Check("fabric", "ok", "no EFA or InfiniBand: several machines would use TCP")
    kinds = Counter(" ".join(filter(None, (port.kind, port.rate))) for port in ports)
    found = ", ".join(f"{number} x {kind}" for kind, number in kinds.items())
    verbs = host.path("/dev/infiniband")
    if not (verbs.is_dir() and any(verbs.glob("uverbs*"))):
        return Check("fabric", "wrong", f"{found}, and none in /dev/infiniband", "the devices in this container too",
                     "ask for them in the pod's limits (vpc.amazonaws.com/efa, rdma/ib), or --device=/dev/infiniband")
    down = [port.name for port in ports if not port.is_up]
    return check("fabric", not down, found + (f"; down: {', '.join(down)}" if down else ""), "every port active",
                  "ibstat on the host; a port that is down halves what NCCL gets, or hangs it", bad="warning")


def _libfabric(host: Host) -> Check:
    answer = host.ask("fi_info", "-p", "efa") or host.ask("/opt/amazon/efa/bin/fi_info", "-p", "efa")
    return check("libfabric", bool(answer and "provider: efa" in answer), "sees EFA" if answer else "does not see EFA",
                  "fi_info lists the provider efa",
                  "an image with the EFA installer's libfabric: embark render writes a Dockerfile that has it")


def _plugin(host: Host) -> Check:
    """Without it NCCL silently uses TCP, and is many times slower."""
    folders = [*host.env.get("LD_LIBRARY_PATH", "").split(":"), *_PLUGIN_FOLDERS]
    found = next((path for folder in folders if folder for path in _libraries(host.path(folder))), None)
    return check("nccl plugin", found is not None, str(found) if found else "no libnccl-net.so for EFA",
                  "aws-ofi-nccl on the library path", "an image with aws-ofi-nccl; without it NCCL uses TCP")


def _libraries(folder: Path) -> Iterator[Path]:
    for pattern in ("libnccl-net*.so*", "*/libnccl-net*.so*", "lib*/*/libnccl-net*.so*"):
        if folder.is_dir():
            yield from folder.glob(pattern)


def _locked_memory(has_rdma: bool) -> Check:
    """RDMA pins the memory that it reads and writes."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    is_infinite = soft == resource.RLIM_INFINITY
    found = "unlimited" if is_infinite else f"{soft // 1024:,} KiB"
    if not has_rdma:
        return Check("locked memory", "ok", found, "any: there is no RDMA device")
    return check("locked memory", is_infinite, found, "unlimited, for RDMA",
                  "the capability IPC_LOCK for the pod, or --ulimit memlock=-1; LimitMEMLOCK=infinity on a host")
