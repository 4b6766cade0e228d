"""The local cache of an object store's parts: bounded, shared, checked."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from limits import HANG_S
from prepared_rows import Made, make_prepared

from embark.data import SampleSource, open_source, resolve_from_data
from embark.data.prepared import cache
from embark.data.prepared import cache as cache_module
from embark.data.prepared.cache import CachedParts, cache_directory
from embark.errors import DataError, Fault
from embark.spec import resolve
from embark.store.object_store import LocalStore

URI = "far://bucket/prepared"


class FarStore(LocalStore):
    """A folder that stands for a store, slow where asked."""

    def __init__(self, root: Path, delay_s: float = 0.0) -> None:
        super().__init__(root)
        self.uri = URI
        self.delay_s = delay_s
        self.fetched: list[str] = []

    def download(self, path: str, to: Path) -> None:
        time.sleep(self.delay_s)
        self.fetched.append(path)
        super().download(path, to)


def open_far(raw: dict[str, object], store: LocalStore) -> SampleSource:
    """The source of a spec whose object store is `store`."""
    with mock.patch.object(cache, "open_store", return_value=store):
        return open_source(resolve_from_data(resolve(raw)))


def largest_bytes(made: Made) -> int:
    return max(part.size_bytes for parts in made.manifest.parts.values() for part in parts)


def raw_spec(made: Made, cache: Path, num_parts: float, **data: object) -> dict[str, object]:
    return {"data": {"kind": "prepared", "path": URI, "cache_dir": str(cache),
                     "cache_gb": num_parts * largest_bytes(made) / 1e9, **data}}


def held_bytes(directory: Path) -> int:
    """Of parts and of space reserved for parts, while no process changes it."""
    if not (directory / "locks").is_dir():
        return 0
    with (directory / "locks" / "space").open("ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        files = [file for file in directory.iterdir() if file.suffix in (".bin", ".reserved")]
        return sum(file.stat().st_size for file in files if file.exists())


@contextmanager
def watching(directory: Path) -> Iterator[list[int]]:
    """The sizes that the directory had meanwhile."""
    sizes, is_over = [0], threading.Event()

    def watch() -> None:
        while not is_over.wait(0.001):
            sizes.append(held_bytes(directory))

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield sizes
    finally:
        is_over.set()
        thread.join()


@pytest.mark.parametrize("num_parts", [1, 2.5, 6])
def test_rows_are_those_of_the_folder_and_the_cache_keeps_to_its_size(tmp_path: Path, num_parts: float):
    made = make_prepared(tmp_path / "far", part_bytes=2_000)
    spec = raw_spec(made, tmp_path / "cache", num_parts)
    store = FarStore(made.path)
    far, near = open_far(spec, store), made.open()
    assert len(made.manifest.parts["train"]) > 8
    with watching(cache_directory(URI, str(tmp_path / "cache"))) as sizes:
        for epoch in range(2):
            for start in range(0, 1_000, 100):
                found, wanted = (s.train_rows(epoch, start, start + 100) for s in (far, near))
                np.testing.assert_array_equal(found.ids, wanted.ids)
            np.testing.assert_array_equal(far.eval_rows(0, 150).ids, near.eval_rows(0, 150).ids)
    assert 0 < max(sizes) <= num_parts * largest_bytes(made)
    assert len(store.fetched) > len(made.manifest.parts["train"]), "two epochs do not fit"


def test_with_space_for_all_each_part_is_fetched_once(tmp_path: Path):
    made = make_prepared(tmp_path / "far", part_bytes=2_000)
    store = FarStore(made.path)
    spec = raw_spec(made, tmp_path / "cache", 100)
    for _ in range(2):
        source = open_far(spec, store)
        for epoch in range(2):
            source.train_rows(epoch, 0, 1_000)
    assert sorted(store.fetched) == sorted(p.file for p in made.manifest.parts["train"])


def test_the_next_parts_of_the_epoch_are_fetched_before_they_are_used(tmp_path: Path):
    made = make_prepared(tmp_path / "far", part_bytes=2_000)
    store = FarStore(made.path)
    spec = raw_spec(made, tmp_path / "cache", 100)
    open_far(spec, store).train_rows(0, 0, 1)
    for _ in range(200):
        if len(store.fetched) == 5:
            break
        time.sleep(0.01)
    parts = made.manifest.parts["train"]
    numbers = made.open().train_rows(0, 0, 1_000).dense[:, 0]
    order = list(dict.fromkeys((numbers // parts[0].rows).astype(int).tolist()))
    assert set(store.fetched) == {parts[part].file for part in order[:5]}


def test_the_longest_unused_goes_first(tmp_path: Path):
    made = make_prepared(tmp_path / "far", part_bytes=2_000)
    parts = made.manifest.parts["train"][:4]
    store, size = FarStore(made.path), largest_bytes(made)
    directory = tmp_path / "cache"

    def cached() -> CachedParts:
        return CachedParts(store, directory, 3 * size, made.layout, made.manifest.block_rows, size)

    for age, part in zip((30, 10, 20), parts, strict=False):
        cache = cached()
        with cache.using(part):
            pass
        cache.close()
        when = time.time() - age
        os.utime(directory / f"{part.sha256}.bin", (when, when))
    with cached().using(parts[3]):
        retained = {file.stem for file in directory.glob("*.bin")}
    assert retained == {parts[1].sha256, parts[2].sha256, parts[3].sha256}


def test_a_part_in_use_is_never_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(cache_module, "_MAX_WAIT_S", 0.2)
    made = make_prepared(tmp_path / "far", part_bytes=2_000)
    first, second = made.manifest.parts["train"][:2]
    store, size = FarStore(made.path), largest_bytes(made)
    directory = tmp_path / "cache"
    here, other = (
        CachedParts(store, directory, size, made.layout, made.manifest.block_rows, size) for _ in range(2)
    )
    with here.using(first), pytest.raises(Fault, match=r"no space.*other processes use all"), other.using(second):
        pass
    assert [file.stem for file in directory.glob("*.bin")] == [first.sha256]


def test_unused_parts_are_released_when_another_process_needs_space(tmp_path: Path):
    made = make_prepared(tmp_path / "far", part_bytes=2_000)
    first, second = made.manifest.parts["train"][:2]
    store, size = FarStore(made.path), largest_bytes(made)

    here, other = (
        CachedParts(store, tmp_path / "cache", size, made.layout, made.manifest.block_rows, size) for _ in range(2)
    )
    is_had = threading.Event()

    def wait() -> None:
        with other.using(second):
            is_had.set()

    with here.using(first):
        waiting = threading.Thread(target=wait)
        waiting.start()
        assert not is_had.wait(0.4)
    assert is_had.wait(HANG_S)
    waiting.join()


WORKER = """
import json, sys
from pathlib import Path
from embark.data import open_source, resolve_from_data
from embark.data.prepared import cache
from embark.spec import resolve
from embark.store.object_store import LocalStore

fetched = []
class FarStore(LocalStore):
    def download(self, path, to):
        fetched.append(path)
        super().download(path, to)

raw, folder, rank = json.loads(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
store = FarStore(folder)
cache.open_store = lambda uri, retry=None: store
source = open_source(resolve_from_data(resolve(raw)))
seen = []
for epoch in range(3):
    for start in range(0, 1000, 50):
        seen += source.train_rows(epoch, start + 25 * rank, start + 25 * rank + 25).dense[:, 0].tolist()
print(json.dumps({"seen": seen, "fetched": fetched}))
"""


@pytest.mark.parametrize("num_parts", [100, 2])
def test_two_processes_share_one_cache(tmp_path: Path, num_parts: int):
    made = make_prepared(tmp_path / "far", part_bytes=2_000)
    raw = json.dumps(raw_spec(made, tmp_path / "cache", num_parts))
    with watching(cache_directory(URI, str(tmp_path / "cache"))) as sizes:
        workers = [
            subprocess.Popen([sys.executable, "-c", WORKER, raw, str(made.path), str(rank)], stdout=subprocess.PIPE,
                             env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)})
            for rank in range(2)
        ]
        result = [json.loads(worker.communicate(timeout=HANG_S)[0]) for worker in workers]
    near = made.open()
    for rank in range(2):
        assert result[rank]["seen"] == [
            number
            for epoch in range(3)
            for start in range(0, 1_000, 50)
            for number in near.train_rows(epoch, start + 25 * rank, start + 25 * rank + 25).dense[:, 0].tolist()
        ]
    assert max(sizes) <= num_parts * largest_bytes(made)
    if num_parts == 100:
        both = result[0]["fetched"] + result[1]["fetched"]
        assert sorted(both) == sorted(p.file for p in made.manifest.parts["train"]), "each once between them"


def test_a_download_that_is_not_what_the_manifest_says_is_refused(tmp_path: Path):
    made = make_prepared(tmp_path / "far", part_bytes=2_000)
    spec = raw_spec(made, tmp_path / "cache", 5)
    for part in made.manifest.parts["train"]:
        file = made.path / part.file
        damaged = bytearray(file.read_bytes())
        damaged[100] ^= 1
        file.write_bytes(damaged)
    source = open_far(spec, FarStore(made.path))
    with pytest.raises(DataError, match=r"far://bucket/prepared/train/part-.*checksum"):
        source.train_rows(0, 0, 10)
    assert not list(cache_directory(URI, str(tmp_path / "cache")).glob("*.bin"))


def test_a_download_that_was_damaged_on_the_way_is_fetched_again(tmp_path: Path):
    made = make_prepared(tmp_path / "far", part_bytes=2_000)

    class Damaging(FarStore):
        def download(self, path: str, to: Path) -> None:
            super().download(path, to)
            if self.fetched.count(path) == 1:
                to.write_bytes(b"x" * to.stat().st_size)

    spec = raw_spec(made, tmp_path / "cache", 5)
    source = open_far(spec, Damaging(made.path))
    np.testing.assert_array_equal(source.train_rows(0, 0, 1_000).ids, made.open().train_rows(0, 0, 1_000).ids)


def test_what_a_killed_process_left_is_cleared_away(tmp_path: Path):
    made = make_prepared(tmp_path / "far", part_bytes=2_000)
    store, size = FarStore(made.path), largest_bytes(made)
    directory = tmp_path / "cache"
    one, two, three = made.manifest.parts["train"][:3]
    cached = CachedParts(store, directory, size, made.layout, made.manifest.block_rows, size)
    (directory / f"{one.sha256}.bin.reserved").write_bytes(b"0" * size)
    (directory / f".{two.sha256}.bin.reserved.0123456789ab.embark-part").write_bytes(b"0" * size)
    (directory / f"{three.sha256}.bin").write_bytes(b"cut short")
    with cached.using(three) as part:
        assert len(part.block(0).label)
    assert sorted(f.name for f in directory.iterdir() if f.is_file()) == [f"{three.sha256}.bin"]


def test_a_store_that_fails_raises_where_its_part_is_read(tmp_path: Path):
    made = make_prepared(tmp_path / "far", part_bytes=2_000)

    class Broken(FarStore):
        def download(self, path: str, to: Path) -> None:
            raise Fault("the store is on fire")

    spec = raw_spec(made, tmp_path / "cache", 5)
    source = open_far(spec, Broken(made.path))
    with pytest.raises(Fault, match="on fire"):
        source.train_rows(0, 0, 10)


def test_a_cache_too_small_for_a_part_is_refused_with_a_better_size(tmp_path: Path):
    made = make_prepared(tmp_path / "far", part_bytes=2_000)
    spec = raw_spec(made, tmp_path / "cache", 0.5)
    with pytest.raises(DataError, match=r"data\.cache_gb") as caught:
        open_far(spec, FarStore(made.path))
    size_gb = float(caught.value.fix.split("to ")[1].split(" or")[0])
    spec["data"]["cache_gb"] = size_gb
    open_far(spec, FarStore(made.path)).train_rows(0, 0, 1_000)


def test_data_that_changed_under_its_uri_is_not_mixed_with_the_cache(tmp_path: Path):
    before = make_prepared(tmp_path / "far", part_bytes=2_000)
    raw = raw_spec(before, tmp_path / "cache", 100)

    def ids(made: Made) -> bytes:
        spec = raw
        return open_far(spec, FarStore(made.path)).train_rows(0, 0, 900).ids.tobytes()

    first = ids(before)
    shutil.rmtree(tmp_path / "far")
    after = make_prepared(tmp_path / "far", train=900, part_bytes=2_000)
    assert ids(after) == after.open().train_rows(0, 0, 900).ids.tobytes() != first


def test_the_directory_is_the_users_own_where_none_is_chosen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    name = hashlib.sha256(URI.encode()).hexdigest()[:24]
    assert cache_directory(URI) == cache_directory(URI + "/") == tmp_path / "embark" / "data" / name
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_directory(URI) == tmp_path / ".cache" / "embark" / "data" / name
