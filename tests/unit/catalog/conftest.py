import shutil
from pathlib import Path

import pytest

from embark.catalog.load import HERE, read_catalog


@pytest.fixture(scope="session")
def catalog():
    """As it is shipped, whatever this user has taken in."""
    return read_catalog(HERE)


@pytest.fixture
def folder(tmp_path):
    """A copy of the catalog's files to spoil."""
    copy = tmp_path / "catalog"
    copy.mkdir()
    for path in Path(HERE).iterdir():
        if path.suffix in (".csv", ".toml"):
            shutil.copy(path, copy)
    return copy
