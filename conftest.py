"""Skips what cannot run here and, at the end, says what was not run and what would get it.

Tests that need containers, emulators, browsers or compilers are slow by what they use (SLOW_TOOLS, SLOW_FIXTURES);
others that take long say so with `@pytest.mark.slow`. `make test` leaves slow tests out, `make test-slow` runs only
them.

With EMBARK_REQUIRE_ALL=1, as in CI, a skip is a failure unless the test is marked `gpu` or `schemas`, or
`x86_64` on another processor.
"""

from __future__ import annotations

import atexit
import gc
import multiprocessing.util
import os
import platform
import re
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from needs import TOOLS

import cloudsim  # noqa: F401  Before pytest takes the folder of that name for the parent package of the tests in it.

# Compiling embark in every process that a test starts, and rewriting all assertions again, takes minutes.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
if "PYTEST_XDIST_WORKER" in os.environ:
    # Workers share the processors: OpenMP's threads would spin while they wait for their turn. Torch reads it once.
    os.environ["OMP_NUM_THREADS"] = "1"
os.environ["ONEDNN_JIT_PROFILE"] = "0"  # On ARM it would leave /tmp/perf-PID.map. embark.trainers.torch sets it too.
if not any(Path("/dev").glob("nvidia[0-9]*")):
    # The GPU kernels then run on the CPU, in Triton's interpreter. Triton reads it as it is first imported.
    os.environ["TRITON_INTERPRET"] = "1"

BY_HAND = {"gpu": "an NVIDIA GPU", "schemas": "the definitions of JobSet, Kueue, KubeRay and eksctl in EMBARK_SCHEMAS",
           "x86_64": "an x86_64 processor, the only one that libtpu and jax-tpu-embedding have wheels for"}
"""What is run by hand, and what it takes."""
TPU_COMPILER = "make .venv/.dev, which gets the TPU's compiler; or pip install 'jax[tpu]'"
INTEGRATION = Path(__file__).parent / "tests/integration"
SLOW_TOOLS = {"podman", "chromium", "prometheus", "azurite", "sshd", "slurm"}
SLOW_FIXTURES = {"s3_emulator", "gs_emulator", "az_emulator", "gs_xml_emulator", "image_store"}
SLOW_TEXT = re.compile("|".join(
    [r"mark\.(slow|tpu)\b", *SLOW_FIXTURES, *(rf"[\"']{tool}[\"']" for tool in sorted(SLOW_TOOLS))]))
"""A file outside tests/integration has slow tests only if this is in it; `make test` holds all files to that."""
PROPERTY = "embark_skipped_for"
"""Rides on the test's report, so that it crosses from xdist's workers to the session that counts."""


def pytest_configure(config: pytest.Config) -> None:
    gc.disable()
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        # A shell starts what goes to its background so, and all that is started from there would be deaf to Ctrl-C too.
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(NotRun(), "embark_not_run")
        _remove_temporary_files_at_the_end(config)


def _remove_temporary_files_at_the_end(config: pytest.Config) -> None:
    """What programs leave there that are killed, and libraries that never remove it. Workers inherit the folder; its
    name is short for the sake of sockets. pytest's own folder stays where it is."""
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())
    folder = TemporaryDirectory(prefix="et-", ignore_cleanup_errors=True)
    config.add_cleanup(folder.cleanup)
    config.add_cleanup(multiprocessing.util._exit_function)  # first: it removes a folder of its own there
    Path(folder.name).chmod(0o755)  # containers have users of their own
    os.environ["TMPDIR"] = tempfile.tempdir = folder.name
    os.environ["EMBARK_CACHE"] = f"{folder.name}/cache"


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """With `-m slow`, files that cannot have a slow test are not even imported."""
    return True if config.option.markexpr == "slow" and not _may_have_slow_tests(collection_path) else None


@cache
def _may_have_slow_tests(path: Path) -> bool:
    if path.is_dir():
        return any(_may_have_slow_tests(file) for file in path.rglob("test_*.py"))
    return path.is_relative_to(INTEGRATION) or SLOW_TEXT.search(path.read_text()) is not None


@pytest.hookimpl(wrapper=True)
def pytest_pycollect_makeitem(collector: pytest.Module) -> Iterator[None]:
    made = yield
    for item in made if isinstance(made, list) else ():
        if _uses_something_slow(item):
            item.add_marker("slow")
        if item.get_closest_marker("slow") and not _may_have_slow_tests(item.path):
            raise pytest.Collector.CollectError(f"{item.name} is slow, but make test-slow would not import this file: "
                                                f"SLOW_TEXT in conftest.py does not match its text")
    return made


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        for kind, reason in _obstacles(item):
            item.user_properties.append((PROPERTY, kind))
            item.add_marker(pytest.mark.skip(reason=reason))
            break


def pytest_collection_finish() -> None:
    # What is imported by now stays; without this each collection looks through all of torch and jax.
    gc.freeze()
    gc.enable()
    # Else nanobind reports all of it as leaked; not earlier, since pytest itself collects many times as it ends.
    atexit.register(gc.unfreeze)


def _uses_something_slow(item: pytest.Item) -> bool:
    tools = {name for marker in item.iter_markers("needs") for name in marker.args}
    fixtures = set(getattr(item, "fixturenames", ()))
    return bool(tools & SLOW_TOOLS or fixtures & SLOW_FIXTURES or item.get_closest_marker("tpu"))


def _obstacles(item: pytest.Item) -> Iterator[tuple[str, str]]:
    if item.get_closest_marker("gpu") and not has_gpu():
        yield "gpu", "needs an NVIDIA GPU"
    if item.get_closest_marker("schemas") and not os.environ.get("EMBARK_SCHEMAS"):
        yield "schemas", BY_HAND["schemas"]
    if item.get_closest_marker("x86_64") and platform.machine() != "x86_64":
        yield "x86_64", f"needs {BY_HAND['x86_64']}"
    if item.get_closest_marker("tpu") and not has_tpu_compiler():
        yield ("tpu", TPU_COMPILER) if platform.machine() == "x86_64" else ("x86_64", f"needs {BY_HAND['x86_64']}")
    for marker in item.iter_markers("needs"):
        for name in marker.args:
            if name not in TOOLS:
                known = ", ".join(TOOLS)
                raise pytest.UsageError(f"{item.nodeid}: needs({name!r}): tests/support/needs.py knows {known}")
            if not TOOLS[name].is_here:
                yield name, f"needs {name}: {TOOLS[name].how_to_get}"


def has_tpu_compiler() -> bool:
    """Installed, or where `make` puts it: beside the packages, so that JAX on a CPU does not look for TPUs."""
    return find_spec("libtpu") is not None or Path(sys.prefix, "libtpu", "libtpu", "libtpu.so").is_file()


def has_gpu() -> bool:
    return any(Path("/dev").glob("nvidia[0-9]*"))


@pytest.fixture(scope="session")
def warm_python() -> Iterator[str]:
    """A `python` whose embark, torchrun and scripts that train are forked from a process that has imported torch."""
    import warm_python

    scripts = ("tests/integration/faults/held_train.py", "examples/templates/train_torchrec_quickstart.py")
    paths = [str(Path(__file__).parent / script) for script in scripts]
    with (TemporaryDirectory(prefix="embark-warm-") as folder,
          warm_python.warm_python(Path(folder), *paths, modules=warm_python.TORCH) as python):
        yield python


@pytest.fixture(scope="session")
def warm_ray_python() -> Iterator[str]:
    """A `python` whose programs are forked from a process that has imported torch and Ray."""
    import warm_python

    with TemporaryDirectory(prefix="embark-warm-") as folder, warm_python.warm_python(Path(folder)) as python:
        yield python


class NotRun:
    """Counts the skips of the whole session; with xdist it lives on the controller only."""

    def __init__(self) -> None:
        self.by_tool: Counter[str] = Counter()
        self.others: list[str] = []
        self.require_all = os.environ.get("EMBARK_REQUIRE_ALL") == "1"

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.skipped and not hasattr(report, "wasxfail"):
            kind = dict(report.user_properties).get(PROPERTY)
            self._count(report, str(kind) if kind else None)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.skipped:
            self._count(report, None)

    def _count(self, report: pytest.TestReport | pytest.CollectReport, kind: str | None) -> None:
        if kind is not None:
            self.by_tool[kind] += 1
            return
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        self.others.append(f"{report.nodeid}: {reason}")

    @property
    def is_failure(self) -> bool:
        return self.require_all and (bool(self.others) or any(kind not in BY_HAND for kind in self.by_tool))

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self.is_failure and session.exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if not self.by_tool and not (self.require_all and self.others):
            return
        terminalreporter.section("not run here")
        for kind, count in sorted(self.by_tool.items()):
            known = BY_HAND | {"tpu": TPU_COMPILER}
            how = known[kind] if kind in known else TOOLS[kind].how_to_get
            terminalreporter.line(f"{kind}: {count} {'test' if count == 1 else 'tests'}; {how}")
        if self.require_all:
            for line in self.others:
                terminalreporter.line(line)
        if self.is_failure:
            terminalreporter.line(f"EMBARK_REQUIRE_ALL=1: only these may be skipped: {', '.join(BY_HAND)}", red=True)
