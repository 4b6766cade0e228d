"""A run has one holder at a time, whatever its store, and one that lost its lease can write nothing."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import threading
import time
from pathlib import Path
from uuid import uuid4

import pytest
from limits import HANG_S

from embark.errors import ExitCode, RunInUse
from embark.store import ObjectStore, RunDir, lease, open_store
from embark.store.checkpoint_store import FileChecksum
from embark.store.lease import Holder, Lease, acquire, newest_holder, process_mark

TTL_S = 60.0


class Clock:
    """Seconds that pass only when somebody waits for them."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s

    def pause(self, seconds: float) -> None:
        self.now_s += seconds


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture(params=["folder", "memory"])
def store(request, tmp_path) -> ObjectStore:
    return open_store(tmp_path / "run" if request.param == "folder" else f"memory://{uuid4().hex}/run")


@pytest.fixture(autouse=True)
def no_threads(monkeypatch):
    """Renewals are the test's own."""
    monkeypatch.setattr(Lease, "start", lambda self: None)


@pytest.fixture
def elsewhere(monkeypatch):
    """A function after which this process is on another machine: nothing is known there of the processes of this."""

    def move() -> None:
        monkeypatch.setattr(lease, "_boot_and_namespace", lambda: "another-boot pid:[1]")

    return move


def take(store: ObjectStore, clock: Clock, tell=lambda _: None) -> Lease:
    return acquire(store, TTL_S, tell, clock=clock, pause=clock.pause)


def test_a_second_start_is_told_who_holds_the_run(store, clock):
    first = take(store, clock)
    with pytest.raises(RunInUse, match=r"is being trained by process \d+ of .* on .*, since .* UTC, last r") as error:
        take(store, clock, tell=pytest.fail)
    assert error.value.exit_code == ExitCode.BAD_INPUT
    assert f"process {newest_holder(store).pid} " in error.value.what
    first.check()


def test_of_many_starts_at_once_one_holds_the_run(tmp_path, clock):
    store = open_store(tmp_path / "run")
    barrier, held, refused = threading.Barrier(8), [], []

    def start() -> None:
        barrier.wait()
        try:
            held.append(take(store, clock))
        except RunInUse as error:
            refused.append(error)

    threads = [threading.Thread(target=start) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(held), len(refused)) == (1, 7)


def test_a_released_run_is_taken_at_once_with_a_higher_token(store, clock):
    tokens = []
    for _ in range(3):
        held = take(store, clock)
        tokens.append(held.token)
        held.release()
    assert tokens == [1, 2, 3]
    assert clock.now_s == 1000.0
    assert [entry.path for entry in store.list("lease")] == ["lease/000000003.json"]


def test_the_run_of_a_dead_process_of_this_machine_is_taken_at_once(store, clock):
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    held = take(store, clock)
    held._write(dataclasses.replace(held._holder, pid=child.pid, process=process_mark(child.pid)))
    with pytest.raises(RunInUse, match=f"process {child.pid} "):
        take(store, clock)
    child.communicate()
    assert take(store, clock).token == 2
    assert clock.now_s == 1000.0


def test_a_process_that_has_the_id_of_the_dead_one_is_not_taken_for_it(store, clock):
    held = take(store, clock)
    place, _, start = held._holder.process.rpartition(" ")
    held._write(dataclasses.replace(held._holder, process=f"{place} {int(start) - 1}"))
    assert take(store, clock).token == 2


@pytest.mark.parametrize("ends_after_s", [None, 45.0])
def test_a_holder_elsewhere_that_renews_has_its_ttl_to_end(store, clock, elsewhere, ends_after_s):
    """A pod that is being replaced saves and ends while the next one starts."""
    held, told = take(store, clock), []
    elsewhere()

    def pause(seconds: float) -> None:
        clock.pause(seconds)
        held.renew()
        if ends_after_s and clock.now_s > 1000 + ends_after_s:
            held.release()

    if ends_after_s:
        assert acquire(store, TTL_S, told.append, clock=clock, pause=pause).token == 2
    else:
        with pytest.raises(RunInUse, match="is being trained by"):
            acquire(store, TTL_S, told.append, clock=clock, pause=pause)
    assert clock.now_s <= 1000 + TTL_S + 1
    assert ["waiting 60 s for it to end" in text for text in told] == [True]


def test_a_silent_holder_elsewhere_loses_the_run_after_its_ttl(store, clock, elsewhere):
    held, others_clock = take(store, clock), Clock()
    others_clock.now_s = 5.0  # Clocks of two machines have nothing in common.
    elsewhere()
    taken = take(store, others_clock)
    assert taken.token == 2
    assert TTL_S <= others_clock.now_s - 5.0 < TTL_S + 3
    clock.pause(TTL_S)
    with pytest.raises(RunInUse, match="taken over from this process"):
        held.check()
    assert held.is_lost()
    taken.check()


def test_a_holder_that_dies_while_it_is_watched_is_waited_for(store, clock, elsewhere):
    held = take(store, clock)
    elsewhere()

    def pause(seconds: float) -> None:
        clock.pause(seconds)
        if clock.now_s == 1002:
            held.renew()

    assert acquire(store, TTL_S, clock=clock, pause=pause).token == 2
    assert 1002 + TTL_S <= clock.now_s <= 1004 + TTL_S


def test_a_stopped_process_keeps_the_run_for_its_ttl_only(store, clock, monkeypatch):
    take(store, clock)
    stat = lease._stat
    monkeypatch.setattr(lease, "_stat", lambda pid: ["T", *stat(pid)[1:]])
    assert take(store, clock).token == 2
    assert clock.now_s >= 1000 + TTL_S


def test_a_holder_that_was_late_goes_on_where_nobody_came(store, clock):
    held = take(store, clock)
    clock.pause(100 * TTL_S)
    assert not held.is_lost()
    held.renew()
    held.check()
    assert held.token == 2


def test_a_renewal_that_arrives_too_late_counts_for_nothing(store, clock, monkeypatch):
    """Whoever saw the lease expire may be taking it just then; only another number tells who was first."""
    held = take(store, clock)
    write = store.write
    monkeypatch.setattr(store, "write", lambda *words: (clock.pause(TTL_S), write(*words)))
    held.renew()
    other = dataclasses.replace(held._holder, token=2, owner="other")
    assert store.create("lease/000000002.json", other.to_json())
    with pytest.raises(RunInUse):
        held.renew()


def test_a_holder_that_renews_stays(store, clock, elsewhere):
    held = take(store, clock)
    for _ in range(10):
        clock.pause(TTL_S / 3)
        held.renew()
    assert held.token == 1
    assert newest_holder(store).num_renewals == 10


def test_a_directory_that_was_removed_and_made_anew_is_not_written(store, clock):
    held = take(store, clock)
    store.delete_prefix("lease")
    with pytest.raises(RunInUse, match="was removed while it was trained"):
        held.renew()
    assert store.list("lease") == []
    again = take(store, clock)
    assert again.token == 1
    with pytest.raises(RunInUse):
        held.check()
    held.release()
    again.check()


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b'{"owner": 1}', b"[" * 100_000, b"\xff",
                                  json.dumps({**dataclasses.asdict(Holder(1)), "text": "", "ttl_s": 1e99}).encode(),
                                  json.dumps({**dataclasses.asdict(Holder(1)), "text": "", "since_s": 1e99}).encode()])
def test_a_lease_that_cannot_be_read_expires_like_any_other(store, clock, text):
    store.write("lease/000000004.json", text)
    assert take(store, clock).token == 5
    assert clock.now_s >= 1000 + TTL_S


def test_who_lost_the_run_commits_removes_and_publishes_nothing(tmp_path, clock, elsewhere):
    store = open_store(tmp_path / "run")
    held = take(store, clock)
    run = RunDir(str(tmp_path / "run"), lease=held)
    checkpoints = run.checkpoints
    files = {"a": FileChecksum(1, "")}
    checkpoints.store.write("step-000000010/a", b"x")
    checkpoints.commit(10, files, {})
    checkpoints.store.write("step-000000020/a", b"x")
    elsewhere()
    take(store, Clock())
    clock.pause(TTL_S)
    before = [(entry.path, entry.size_bytes) for entry in store.list("checkpoints")]
    for write in (lambda: checkpoints.commit(20, files, {}), lambda: checkpoints.remove(10),
                  lambda: checkpoints.begin(20), run.check_lease):
        with pytest.raises(RunInUse):
            write()
    assert [(entry.path, entry.size_bytes) for entry in store.list("checkpoints")] == before


def test_a_mark_that_is_late_does_not_replace_the_next_holders(tmp_path, clock, elsewhere, monkeypatch):
    """Paused between the look at the lease and the write of the mark."""
    store = open_store(tmp_path / "run")
    old = RunDir(str(tmp_path / "run"), lease=take(store, clock)).checkpoints
    old.store.write("step-000000010/a", b"x")
    create = old.store.create

    def paused(path: str, data: bytes) -> bool:
        elsewhere()
        new = RunDir(str(tmp_path / "run"), lease=take(store, Clock()))
        new.checkpoints.begin(10)
        new.checkpoints.store.write("step-000000010/b", b"y")
        new.checkpoints.commit(10, {"b": FileChecksum(1, "")}, {"lease": 2})
        clock.pause(TTL_S)
        return create(path, data)

    monkeypatch.setattr(old.store, "create", paused)
    with pytest.raises(RunInUse):
        old.commit(10, {"a": FileChecksum(1, "")}, {"lease": 1})
    (checkpoint,) = RunDir(str(tmp_path / "run")).checkpoints.committed()
    assert (checkpoint.values["lease"], list(checkpoint.files)) == (2, ["b"])


def test_a_thread_renews_and_release_ends_it(tmp_path, monkeypatch):
    monkeypatch.undo()
    store = open_store(tmp_path / "run")
    held = acquire(store, 0.3)
    until_s = time.monotonic() + HANG_S
    while newest_holder(store).num_renewals < 2 and time.monotonic() < until_s:
        time.sleep(0.01)
    assert newest_holder(store).num_renewals >= 2
    held.release()
    assert newest_holder(store).is_released
    held._thread.join(HANG_S)
    assert not held._thread.is_alive()
    assert newest_holder(store).is_released


def test_a_file_is_created_once_also_where_links_are_not_known(tmp_path, monkeypatch):
    def no_links(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    store = open_store(tmp_path)
    assert store.create("a/b", b"1")
    assert not store.create("a/b", b"2")
    monkeypatch.setattr("os.link", no_links)
    assert not store.create("a/b", b"2")
    assert store.create("a/c", b"3")
    assert (store.read("a/b"), store.read("a/c")) == (b"1", b"3")
    assert sorted(path.name for path in Path(tmp_path, "a").iterdir()) == ["b", "c"]
