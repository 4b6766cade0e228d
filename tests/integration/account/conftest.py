"""One process for all tests of a session whose accounts fork pods from it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from warm_python import warm_python


@pytest.fixture(scope="session")
def warm_ray_python() -> Iterator[str]:
    """A `python` whose programs are forked from a process that has imported torch and Ray."""
    with TemporaryDirectory(prefix="embark-warm-") as folder, warm_python(Path(folder)) as python:
        yield python
