"""A project with a file of each format, built once for all workers, and the folder in which tests damage it."""

from __future__ import annotations

import fcntl
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hostile_files import restore
from hostile_project import build_project

ENVIRONMENT = {"XDG_DATA_HOME": "share", "XDG_CACHE_HOME": "cache", "EMBARK_CACHE": "cache"}


@pytest.fixture(scope="session")
def pristine(tmp_path_factory) -> Path:
    """The project as Embark's commands wrote it; no test changes it."""
    base = tmp_path_factory.getbasetemp()
    shared = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "hostile"
    shared.mkdir(exist_ok=True)
    with (shared / "lock").open("a") as lock, pytest.MonkeyPatch.context() as patched:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (shared / "complete").exists():
            shutil.rmtree(shared / "project", ignore_errors=True)
            (shared / "project").mkdir()
            patched.chdir(shared / "project")
            for name, folder in ENVIRONMENT.items():
                patched.setenv(name, str(shared / "project" / folder))
            build_project(shared / "project")
            (shared / "complete").touch()
    return shared / "project"


@pytest.fixture(scope="session")
def template(pristine, tmp_path_factory) -> tuple[Path, Path]:
    """Where tests work, and what is put there before each damage: the project, with that folder in absolute paths."""
    base = tmp_path_factory.mktemp("damaged")
    here, made = base / "here", base / "template"
    restore(made, pristine)
    for path in (made / "share").rglob("*.json"):
        path.write_bytes(path.read_bytes().replace(str(pristine).encode(), str(here).encode()))
    return here, made


@pytest.fixture
def here(template, monkeypatch) -> Iterator[Path]:
    """The working directory, beside one in which nothing may change."""
    folder, made = template
    outside = folder.parent / "outside"
    shutil.rmtree(outside, ignore_errors=True)  # of a test that failed
    outside.mkdir()
    (outside / "x").write_text("precious")
    restore(folder, made)
    monkeypatch.chdir(folder)
    for name, below in ENVIRONMENT.items():
        monkeypatch.setenv(name, str(folder / below))
    # Whoever holds a damaged lease is not known, and is waited for: here a minute passes in a second.
    monkeypatch.setattr("embark.store.lease._seconds", lambda: 60 * time.monotonic())
    yield folder
    assert {path.name: path.read_text() for path in outside.iterdir()} == {"x": "precious"}
    assert sorted(path.name for path in folder.parent.iterdir()) == ["here", "outside", "template"]
    shutil.rmtree(outside)
