"""Every kind of object store, each on its emulator, which is started when first used."""

from __future__ import annotations

import os
from collections.abc import Iterator
from uuid import uuid4

import pytest
from integration.cloud import emulators
from integration.cloud.emulators import Emulator, outside_of_clouds
from integration.cloud.image import Store, common_folder, shared_store

from embark.store import ObjectStore, open_store
from embark.store.errors import RetryPolicy

HASTY = RetryPolicy(max_retries=3, first_wait_s=0.02, longest_wait_s=0.1, connect_s=2, silence_s=20, request_s=30,
                 give_up_s=30)
KINDS = [
    "file", "memory", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("s3", "gs_xml", "gs")),
    pytest.param("az", marks=[pytest.mark.slow, pytest.mark.needs("azurite")]),
]


@pytest.fixture(scope="session")
def s3_emulator():
    with emulators.s3() as emulator:
        yield emulator


@pytest.fixture(scope="session")
def gs_emulator():
    with emulators.gs() as emulator:
        yield emulator


@pytest.fixture(scope="session")
def az_emulator():
    with emulators.az() as emulator:
        yield emulator


@pytest.fixture(scope="session")
def gs_xml_emulator(s3_emulator):
    return emulators.gs_xml(s3_emulator)


@pytest.fixture(scope="session")
def image_store(tmp_path_factory) -> Iterator[Store]:
    """The rendered image, built once for all workers."""
    with shared_store(common_folder(tmp_path_factory.getbasetemp())) as store:
        yield store


@pytest.fixture
def environment(monkeypatch, tmp_path):
    """Sets the variables of an emulator, and no others of any cloud."""
    clean = outside_of_clouds(tmp_path)

    def enter(emulator_env: dict[str, str]) -> None:
        for name in set(os.environ) - set(clean):
            monkeypatch.delenv(name)
        for name, value in {**clean, **emulator_env}.items():
            monkeypatch.setenv(name, value)

    enter({})
    return enter


@pytest.fixture(params=KINDS)
def store(request, environment, tmp_path) -> ObjectStore:
    """One to an empty prefix of each kind of store."""
    prefix = uuid4().hex
    if request.param == "file":
        return open_store(tmp_path / prefix)
    if request.param == "memory":
        return open_store(f"memory://{prefix}", HASTY)
    emulator: Emulator = request.getfixturevalue(f"{request.param}_emulator")
    environment(emulator.env)
    return open_store(f"{emulator.uri}/{prefix}", HASTY)
