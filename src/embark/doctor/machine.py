"""Checks this machine: Python, system, processors, memory, limits, clock, disk, and the age of the price catalog."""

import datetime
import os
import platform
import resource
import shutil
import sys
import tempfile
import time
from pathlib import Path

from embark.catalog import load_catalog
from embark.catalog.machine import WARNING_DAYS, Catalog
from embark.errors import EmbarkError
from embark.model.engine_selection import cpu_has_matrix_bf16
from embark.plan.here import LocalGpu, LocalPlan, ThisMachine, plan_here
from embark.run.host import cgroup_limit_bytes, cpu_quota
from embark.spec import RunSpec
from embark.stack import versions as stack
from .credentials import check_credentials
from .gpus import check_driver, check_gpus, list_gpus, version_of
from .host import GIB, Check, Checks, Host, Verdict, check, size_text
from .network import Facts, Probe, check_network, check_ranks

MIN_SHM_BYTES = 1 * GIB  # NCCL and data loaders use /dev/shm; a container's default of 64 MiB ends in a bus error.
MIN_OPEN_FILES = 4096  # Every rank holds sockets to every other one, and files of prepared data.
MIN_PROCESSES = 1024  # Every rank has tens of threads, which count.
FRESH_DAYS = 120  # Clouds change on-demand prices a few times a year; spot prices change by the hour.
_CONTAINERS = (("/.dockerenv", "docker"), ("/run/.containerenv", "podman"))


def check_machine(host: Host) -> Checks:
    yield python()
    yield system()
    yield container(host)
    yield cpu_features(host)
    yield cores(host)
    yield memory(host)
    yield shared_memory(host)
    yield limit("open files", resource.RLIMIT_NOFILE, MIN_OPEN_FILES, "n")
    yield limit("processes", resource.RLIMIT_NPROC, MIN_PROCESSES, "u", bad="warning")
    yield compiler(host)
    yield clock(host)


def python() -> Check:
    pythons = stack.default_triple().pythons
    found = f"{sys.version_info.major}.{sys.version_info.minor}"
    fix = f"make the environment with one torch has wheels for: python{pythons[-1]} -m venv .venv"
    return check("python", found in pythons, platform.python_version(), f"one of {', '.join(pythons)}", fix)


def system() -> Check:
    found = f"{platform.system()} {platform.machine()}"
    fix = "fbgemm has no wheels for other systems: use a Linux container or a Linux machine"
    return check("system", found in ("Linux x86_64", "Linux aarch64"), found, "Linux x86_64 or aarch64", fix)


def container(host: Host) -> Check:
    """Report in which container the checks run, since its limits apply to the others. It is always ok."""
    if host.env.get("KUBERNETES_SERVICE_HOST"):
        return Check("container", "ok", "a pod of Kubernetes")
    marked = next((name for path, name in _CONTAINERS if host.path(path).exists()), "")
    groups = host.read("/proc/1/cgroup")
    by_group = next((name for name in ("kubepods", "docker", "libpod", "containerd") if name in groups), "")
    return Check("container", "ok", f"yes: {marked or by_group}" if marked or by_group else "no")


def cpu_features(host: Host) -> Check:
    """Never wrong: it says what `train.precision = "auto"` takes on this CPU."""
    has_units = cpu_has_matrix_bf16(host.path("/proc/cpuinfo"))
    return Check("cpu bf16", "ok", "amx_bf16" if has_units else "no: fp32 is the default on this CPU", "amx_bf16")


def cores(host: Host) -> Check:
    usable = usable_cores(host)
    found = f"{usable:g}" + (" (the container's limit)" if usable < _allowed_cores() else "")
    fix = "give the container or the job at least two CPUs: one loads data while the other trains"
    return check("cores", usable >= 2, found, "at least 2", fix)


def memory(host: Host) -> Check:
    usable = usable_bytes(host)
    found = f"{usable / GIB:.1f} GiB" + (" (the container's limit)" if usable < _total_bytes(host) else "")
    if usable < 4 * GIB:
        return Check("memory", "wrong", found, "at least 4 GiB", "raise the container's memory limit")
    kills = _oom_kills(host)
    if kills:
        return Check("memory", "warning", f"{found}; {kills} processes of this container were killed for it",
                     "none killed", "raise the container's memory limit, or run fewer ranks or a smaller batch")
    return Check("memory", "ok", found, "at least 4 GiB")


def shared_memory(host: Host) -> Check:
    where = host.path("/dev/shm")
    expected = f"at least {MIN_SHM_BYTES / GIB:.0f} GiB"
    fix = "start the container with --shm-size=8g; on Kubernetes mount an emptyDir of medium Memory at /dev/shm"
    if not where.exists():
        return Check("/dev/shm", "wrong", "missing", expected, fix)
    usage = shutil.disk_usage(where)
    if usage.total < MIN_SHM_BYTES:
        return Check("/dev/shm", "wrong", size_text(usage.total), expected, fix)
    found = f"{size_text(usage.total)}, {size_text(usage.free)} free"
    left = "killed processes leave files there: ls -l /dev/shm"
    return check("/dev/shm", usage.free >= MIN_SHM_BYTES // 2, found, expected, left, bad="warning")


def limit(name: str, number: int, least: int, ulimit: str, *, bad: Verdict = "wrong") -> Check:
    """Check a limit of this process and those it starts."""
    soft, hard = resource.getrlimit(number)
    is_unlimited = soft == resource.RLIM_INFINITY
    reachable = hard == resource.RLIM_INFINITY or hard >= least
    option = {"n": "nofile", "u": "nproc"}[ulimit]
    fix = f"ulimit -{ulimit} {least}" if reachable else f"as root: prlimit --pid $$ --{option}={least}"
    found = "unlimited" if is_unlimited else str(soft)
    return check(name, is_unlimited or soft >= least, found, f"at least {least}", fix, bad=bad)


def compiler(host: Host) -> Check:
    names = (host.env.get("CXX", "g++"), "g++", "clang++")
    found = next((path for name in names if (path := shutil.which(name, path=host.env.get("PATH", "")))), None)
    expected = "g++ or clang++, for torch.compile"
    return check("c++ compiler", found is not None, found or "missing", expected, "apt-get install -y g++")


def clock(host: Host) -> Check:
    """Object stores refuse requests that are signed minutes off, and logs of several machines are merged by time."""
    answer = host.ask("timedatectl", "show", "--property=NTPSynchronized", "--value")
    if answer is None:
        return Check("clock", "ok", "unknown: timedatectl does not answer")
    is_set = answer.strip() == "yes"
    return check("clock", is_set, "synchronised" if is_set else "not synchronised", "synchronised by NTP",
                 "systemctl enable --now chrony (or systemd-timesyncd) on the host", bad="warning")


def usable_cores(host: Host) -> float:
    """Return the processors that a process here may use."""
    quota = cpu_quota(host.read)
    return min(_allowed_cores(), quota) if quota else _allowed_cores()


def usable_bytes(host: Host) -> int:
    """Memory that a process here may use."""
    total = _total_bytes(host)
    return min(total, cgroup_limit_bytes(host.read) or total)


def _allowed_cores() -> float:
    return float(len(os.sched_getaffinity(0))) if hasattr(os, "sched_getaffinity") else float(os.cpu_count() or 1)


def _total_bytes(host: Host) -> int:
    for line in host.read("/proc/meminfo").splitlines():
        if line.startswith("MemTotal:"):
            return int(line.split()[1]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _oom_kills(host: Host) -> int:
    for line in host.read("/sys/fs/cgroup/memory.events").splitlines():
        name, _, number = line.partition(" ")
        if name == "oom_kill" and number.strip().isdigit():
            return int(number)
    return 0


def check_prices(today: datetime.date, catalog: Catalog | None = None) -> Check:
    """Check that the catalog's prices are recent."""
    try:
        dates = sorted(price.origin.date for price in (catalog or load_catalog()).prices.values())
    except EmbarkError as error:
        return Check("prices", "wrong", error.what.splitlines()[0], "a readable catalog",
                     error.fix or "embark catalog refresh --forget restores the prices that Embark came with")
    if not dates:
        return Check("prices", "warning", "none", "prices", "embark catalog refresh FILE imports a price file")
    usual = dates[len(dates) // 2]  # a day, or a month
    age_days = (today - datetime.date.fromisoformat(usual if len(usual) > 7 else f"{usual}-01")).days
    found = f"{len(dates):,} of {usual}, {age_days} days old; the newest of {dates[-1]}"
    return check("prices", age_days <= FRESH_DAYS, found, f"at most {FRESH_DAYS} days old",
                 "embark catalog refresh FILE imports newer ones; embark doctor --cloud asks the account itself",
                 bad="warning")


def check_versions(today: datetime.date) -> Check:
    """Check that the versions in rendered files are supported for some time."""
    rendered = [one for one in load_catalog().support.values() if one.version]
    notices = [notice for one in rendered if (notice := one.notice(today))]
    ends, title = min((one.ends, one.title) for one in rendered if one.ends)
    return check("versions", not notices, "; ".join(notices) or f"{title} is supported until {ends}",
                 f"supported for {WARNING_DAYS} days", "a newer Embark names newer ones; embark render again",
                 bad="warning")


MIN_DISK_BYTES = 10 * GIB
MAX_PROBE_BYTES = 256 << 20
PROBE_S = 1.0  # Limit of writing.
_PIECE_BYTES = 4 << 20
SLOW_BYTES_PER_S = 100e6  # A 10 GB checkpoint then takes minutes, longer than the notice of a spot machine.


def check_disk(host: Host) -> Checks:
    where = _nearest(host.run_dir)
    yield _free_space(where)
    try:
        num_bytes, seconds = measure(where)
    except OSError as error:
        yield Check("disk speed", "wrong", f"{where}: {error.strerror or error}", "a writable folder",
                    "set store.root to one")
        return
    bytes_per_s = num_bytes / max(seconds, 1e-9)
    found = f"writes {bytes_per_s / 1e6:,.0f} MB/s ({size_text(num_bytes)} in {where})"
    yield check("disk speed", bytes_per_s >= SLOW_BYTES_PER_S, found,
                 f"writes at least {SLOW_BYTES_PER_S / 1e6:.0f} MB/s",
                 "set store.root to a faster disk or an object store: a checkpoint waits for it", bad="warning")


def measure(where: Path, max_bytes: int = MAX_PROBE_BYTES, limit_s: float = PROBE_S) -> tuple[int, float]:
    """Write a temporary file of at most this size for at most this long; return its size and the seconds it took."""
    max_bytes = min(max_bytes, shutil.disk_usage(where).free // 10)
    piece = os.urandom(_PIECE_BYTES)  # incompressible
    with tempfile.TemporaryFile(dir=where, prefix=".embark-doctor-", buffering=0) as file:
        num_bytes, began_s = 0, time.perf_counter()
        while True:
            num_bytes += os.write(file.fileno(), piece)
            # Synchronise each piece, so that a very slow disk is left early.
            os.fdatasync(file.fileno())
            write_s = time.perf_counter() - began_s
            if num_bytes + _PIECE_BYTES > max_bytes or write_s >= limit_s:
                return num_bytes, write_s


def _free_space(where: Path) -> Check:
    free = shutil.disk_usage(where).free
    fix = "free some space, or set store.root to a larger disk: checkpoints go there"
    return check("free disk", free >= MIN_DISK_BYTES, size_text(free), f"at least {MIN_DISK_BYTES / GIB:.0f} GiB", fix)


def _nearest(run_dir: Path) -> Path:
    """Return the folder itself, or its nearest existing parent."""
    folder = run_dir.expanduser().absolute()
    while not folder.is_dir() and folder != folder.parent:
        folder = folder.parent
    return folder


def this_machine(host: Host | None = None) -> ThisMachine:
    """Cores, memory and GPUs that a process here may use, within the container's limits."""
    host = host or Host()
    gpus = tuple(LocalGpu(gpu.name, float(gpu.memory.split()[0]) * 2**20,
                          version_of(gpu.capability) if gpu.capability else None)
                 for gpu in list_gpus(host) if gpu.memory[:1].isdigit())
    return ThisMachine(usable_cores(host), usable_bytes(host), gpus)


def plan_this_machine(spec: RunSpec, num_samples: int | None = None) -> LocalPlan:
    """Plan a run on this machine. `num_samples` in an epoch, if the data cannot be read from here."""
    return plan_here(spec, this_machine(), num_samples)


def check_host(host: Host | None = None, today: datetime.date | None = None) -> Checks:
    """Yield all checks of a machine, in the order to fix them, each as soon as it is known."""
    host = host or Host()
    packages = stack.installed()
    # Torch takes seconds to load, and the rest does not wait for it.
    probe = Probe(host) if packages["torch"] else None
    try:
        found = list_gpus(host)
        yield from check_machine(host)
        for one in stack.check(packages, gpu=bool(found)):
            yield check(one.name, one.ok, one.found or "missing", one.expected, one.fix)
        yield from check_gpus(host, found, packages)
        yield from check_network(host)
        yield from check_disk(host)
        yield from check_credentials(host)
        yield check_prices(today or datetime.date.today())
        yield check_versions(today or datetime.date.today())
        facts = probe.facts() if probe else Facts()
        yield from check_driver(host, facts.cuda, facts.arches, found)
        if probe:
            yield from check_ranks(facts, len(found))
    finally:
        if probe:
            probe.end()
