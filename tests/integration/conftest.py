"""One process for all tests of a session that fork ranks of torch from it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from integration.faults.conftest import Zygote


@pytest.fixture(scope="session")
def zygote() -> Iterator[Zygote]:
    made = Zygote()
    yield made
    made.close()
