"""Checks the network between machines (EFA, InfiniBand, what NCCL needs to use them), and an all-reduce over it."""

import os
import resource
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import field
from pathlib import Path

from pydantic import TypeAdapter

from embark.values import JsonDict, frozen
from .host import Check, Checks, Host, check

_AMAZON = "0x1d0f"
_PLUGIN_FOLDERS = ("/opt/amazon/ofi-nccl", "/opt/aws-ofi-nccl", "/opt/amazon/efa", "/usr/lib/x86_64-linux-gnu",
                   "/usr/local/lib")


@frozen
class Port:
    """One device of /sys/class/infiniband, by its first port."""

    name: str
    kind: str  # `EFA`, `InfiniBand` or `RoCE`.
    rate: str  # `400 Gb/sec`; empty where it does not say.
    is_up: bool


def check_network(host: Host) -> Checks:
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
    """Check for the NCCL plugin of EFA: NCCL silently uses TCP without it, and is many times slower."""
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


MODULE = "embark.trainers.torch.probe"
LIMIT_S = 120.0


@frozen
class Facts:
    """Facts about torch that a child process reports."""

    cuda: str | None = None  # The version that torch was built for.
    nccl: str = ""
    num_gpus: int = 0
    arches: list[str] = field(default_factory=list)
    trouble: str = ""  # Why it failed, or CUDA's error.
    reduce: JsonDict = field(default_factory=dict)


class Probe:
    """A child process that loads torch while other checks run."""

    def __init__(self, host: Host, command: list[str] | None = None) -> None:
        command = command or [sys.executable, "-P", "-m", MODULE]
        self._folder = tempfile.TemporaryDirectory(prefix="embark-doctor-")
        self._answer = Path(self._folder.name, "answer.json")
        self._process = subprocess.Popen([*command, str(self._answer)], stdin=subprocess.DEVNULL,
                                         stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env=dict(host.env),
                                         start_new_session=True)

    def facts(self, limit_s: float = LIMIT_S) -> Facts:
        """Wait for the facts; kill the process if it takes too long."""
        try:
            _, err = self._process.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            self.end()
            return Facts(trouble=f"it did not answer within {limit_s:.0f} s")
        try:
            return TypeAdapter(Facts).validate_json(self._answer.read_bytes())
        except (OSError, ValueError):
            lines = err.decode(errors="replace").strip().splitlines()
            return Facts(trouble=lines[-1] if lines else f"it ended with {self._process.returncode}")

    def end(self) -> None:
        """Kill the process and its ranks, which are in its session."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.communicate()
        self._folder.cleanup()


def check_ranks(facts: Facts, num_gpus: int) -> Checks:
    """Check torch, NCCL and an all-reduce. `num_gpus` is what the driver sees."""
    if facts.trouble and not facts.reduce:
        yield Check("torch runs", "wrong", facts.trouble, "import torch works",
                    f"{sys.executable} -m embark.stack.versions install installs a matched torch, torchrec and fbgemm")
        return
    if facts.trouble or (num_gpus and facts.num_gpus < num_gpus):
        found = facts.trouble or f"torch sees {facts.num_gpus} of {num_gpus} GPUs"
        yield Check("torch runs", "wrong" if facts.cuda else "ok", found, "torch sees every GPU",
                    "CUDA_VISIBLE_DEVICES hides some, or the driver and the build do not match" if facts.cuda else "")
    yield _reduced(facts)
    if (said := facts.reduce.get("nccl_error")) is not None:
        yield check("nccl", not said, said or f"NCCL {facts.nccl} starts on the one GPU", "it starts",
                     "NCCL_DEBUG=INFO says why; embark diagnose reads its log")


def _reduced(facts: Facts) -> Check:
    reduce = facts.reduce
    is_nccl = reduce.get("backend") == "nccl"
    name, ranks = ("nccl", "GPUs") if is_nccl else ("gloo", "processes")
    over = f"{reduce.get('num_ranks', 0)} {ranks}"
    if reduce.get("error"):
        fix = ("NCCL_DEBUG=INFO says why; embark diagnose reads its log" if is_nccl else
               "does this machine's own name resolve? GLOO_SOCKET_IFNAME=lo tries the loopback device")
        return Check(name, "wrong", f"no all-reduce over {over}: {reduce['error']}", "an all-reduce", fix)
    version = f"NCCL {facts.nccl}, " if is_nccl and facts.nccl else ""
    speed = float(reduce.get("bytes_per_s", 0.0)) / 1e9
    return Check(name, "ok", f"{version}all-reduce over {over} at {speed:,.3g} GB/s", "an all-reduce")
