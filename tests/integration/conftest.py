"""Processes that all tests of a session fork their own from, without seconds of imports each."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from integration.faults.conftest import Zygote


@pytest.fixture(scope="session")
def zygote() -> Iterator[Zygote]:
    """Forks ranks of torch."""
    made = Zygote()
    yield made
    made.close()
