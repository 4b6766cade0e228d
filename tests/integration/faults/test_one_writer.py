"""A run has one writer: of two starts one trains, and a writer that lost the run commits nothing."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from integration.cloud.emulators import s3
from integration.faults.conftest import SPEC, TESTS, Run, end_all
from limits import HANG_S

from embark.store import open_store
from embark.store.lease import newest_holder

pytestmark = pytest.mark.slow

NUM_RACES = int(os.environ.get("EMBARK_RACES", "3"))
ENDLESS = ("train.num_steps=1000000", "train.num_epochs=100000")
ELSEWHERE = "integration.faults.hooks:elsewhere"
SHORT = {"EMBARK_LEASE_S": "2"}


@pytest.fixture(scope="module")
def bucket():
    with s3() as emulator:
        yield emulator


@pytest.fixture(params=["folder", "bucket"])
def two_starts(request, zygote, tmp_path):
    """A function from a run's name to two runs of that name, in one directory and from two machines' caches."""
    made: list[Run] = []
    emulator = request.getfixturevalue("bucket") if request.param == "bucket" else None

    def make(name: str) -> tuple[list[Run], dict[str, str]]:
        pair = []
        for side in ("a", "b"):
            folder = tmp_path / side
            folder.mkdir(exist_ok=True)
            root = f"{emulator.uri}/{tmp_path.name}" if emulator else str(tmp_path / "runs")
            pair.append(Run(zygote, folder, name=name, root=root, cache=folder / "cache" if emulator else None))
        made.extend(pair)
        return pair, dict(emulator.env) if emulator else {}

    yield make
    for run in made:
        end_all(run)


def test_of_two_starts_at_the_same_instant_one_trains(two_starts):
    for number in range(NUM_RACES):
        runs, env = two_starts(f"race-{number}")
        started = [run.start(1, env=env) for run in runs]
        codes = [ranks.codes()[0] for ranks in started]
        assert sorted(codes) == [0, 64], "".join(run.output() for run in runs)
        winner, loser = codes.index(0), codes.index(64)
        holder = f"is being trained by process {started[winner].pids[0]} of "
        said = " ".join(runs[loser].output().split())
        assert holder in said
        assert re.search(r"since \d{4}-\d\d-\d\d [\d:]{8} UTC, last renewed", said)


def test_fresh_starts_at_the_same_instant_get_directories_of_their_own(zygote, bucket, tmp_path):
    """From two machines, where nothing of the other's run is in the bucket yet but its lease."""
    runs = []
    for side in ("a", "b"):
        (tmp_path / side).mkdir()
        runs.append(Run(zygote, tmp_path / side, root=f"{bucket.uri}/{tmp_path.name}", cache=tmp_path / side / "cache"))
    started = [run.start(1, flags=("--fresh",), env=dict(bucket.env)) for run in runs]
    assert [ranks.codes() for ranks in started] == [[0], [0]], "".join(run.output() for run in runs)
    names = {path.name for run in runs for path in run.cache.glob("runs/*/*") if (path / "events.jsonl").exists()}
    assert names == {"run", "run-2"}


def test_after_the_owner_is_killed_the_next_start_proceeds(two_starts):
    """At once on the same machine; on another when its lease has expired, and it says what it waits for."""
    (first, second), env = two_starts("killed")
    for hook in ("", ELSEWHERE):
        num_saves = len(first.events("save"))
        ranks = first.start(1, *ENDLESS, env={**env, **SHORT})
        ranks.until(lambda num_saves=num_saves: len(first.events("save")) > num_saves)
        refused = second.start(1, *ENDLESS, env=env, hook=hook)
        assert refused.codes() == [64], second.output()
        ranks.kill(signal.SIGKILL)
        ranks.codes()
        last = first.last_step() + 30
        assert second.ends(1, f"train.num_steps={last}", ENDLESS[1], env=env, hook=hook) == [0], second.output()
        assert second.last_step() == last
    said = " ".join(second.output().split())
    assert f"held by process {ranks.pids[0]} of " in said
    assert "waiting 2 s for it to end" in said


def test_an_owner_paused_for_longer_than_its_lease_commits_nothing(zygote, tmp_path):
    paused, taking = Run(zygote, tmp_path / "a", root=str(tmp_path)), Run(zygote, tmp_path / "b", root=str(tmp_path))
    for run in (paused, taking):
        run.directory.mkdir()
    path = tmp_path / "run"
    old = paused.start(2, *ENDLESS, "store.checkpoint_every=2", "store.keep_checkpoints=2", env=SHORT)
    old.until(lambda: len(list(path.glob("checkpoints/*/commit.json"))) > 1)
    old.kill(signal.SIGSTOP)
    held = newest_holder(open_store(path))
    try:
        new = taking.start(2, *ENDLESS, "store.checkpoint_every=2", "store.keep_checkpoints=2", env=SHORT)
        new.until(lambda: any(mark["lease"] > held.token for mark in marks(path)))
        num_events = len(taking.events())
    finally:
        old.kill(signal.SIGCONT)
    assert old.codes() == [64, 64], paused.output()
    assert re.search(r"was taken over from this process, .* by process \d+", " ".join(paused.output().split()))
    new.until(lambda: len(taking.events()) > num_events + 20)
    new.kill(signal.SIGTERM)
    assert new.codes() == [75, 75], taking.output()
    assert {mark["lease"] for mark in marks(path)} == {newest_holder(open_store(path)).token}
    events = [json.loads(line) for line in (path / "events.jsonl").read_text().splitlines()]
    steps = [event["step"] for event in events if event["event"] == "step"]
    resumed = next(number for number, event in enumerate(events) if event["event"] == "resume")
    after = [event["step"] for event in events[resumed:] if event["event"] == "step"]
    assert after == list(range(events[resumed]["step"] + 1, events[resumed]["step"] + 1 + len(after)))
    assert len(steps) > len(after)


def test_ranks_whose_torchrun_is_killed_save_and_release_the_run(tmp_path):
    """Else they would train on beside the next start."""
    (tmp_path / "spec.toml").write_text(SPEC)
    sets = [word for one in (f"store.root={tmp_path}", *ENDLESS) for word in ("--set", one)]
    command = [sys.executable, "-m", "embark.torchrun", "--standalone", "--nproc-per-node=2", "-m", "embark", "train",
               str(tmp_path / "spec.toml"), *sets]
    path, until_s = tmp_path / "run", time.monotonic() + HANG_S
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(TESTS.parent / "src")}
    with (tmp_path / "log").open("wb") as log, subprocess.Popen(command, cwd=tmp_path, env=env, stdout=log, stderr=log,
                                                                stdin=subprocess.DEVNULL) as agent:
        try:
            while not marks(path) and agent.poll() is None and time.monotonic() < until_s:
                time.sleep(0.05)
        finally:
            agent.kill()
    holder = newest_holder(open_store(path))
    while not holder.is_released and time.monotonic() < until_s:
        time.sleep(0.05)
        holder = newest_holder(open_store(path))
    assert holder.is_released, (tmp_path / "log").read_text()
    events = [json.loads(line) for line in (path / "events.jsonl").read_text().splitlines()]
    assert [event["signal"] for event in events if event["event"] == "interrupt"] == ["SIGTERM"]
    assert max(mark["step"] for mark in marks(path)) == max(e["step"] for e in events if e["event"] == "step")


def marks(path: Path) -> list[dict]:
    found = []
    for mark in sorted(path.glob("checkpoints/*/commit.json")):
        for _ in range(100):
            try:
                found.append(json.loads(mark.read_text()))
                break
            except FileNotFoundError:
                break
            except ValueError:
                time.sleep(0.01)
    return found
