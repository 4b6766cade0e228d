"""Processes that all tests of a session fork their own from, without seconds of imports each."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import warm_python
from integration.faults.conftest import Zygote


@pytest.fixture(scope="session")
def zygote() -> Iterator[Zygote]:
    """Forks ranks of torch."""
    made = Zygote()
    yield made
    made.close()


@pytest.fixture(scope="session")
def warm_ray_python() -> Iterator[str]:
    """A `python` whose programs are forked from a process that has imported torch and Ray."""
    with TemporaryDirectory(prefix="embark-warm-") as folder, warm_python.warm_python(Path(folder)) as python:
        yield python
