"""A run that follows a real broker, both killed at random instants: no record is lost, none is trained on twice."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections.abc import Iterator

import pytest
from integration.faults.conftest import Run

pytest.importorskip("nats")
from malformed_records import RECORDS, write_files
from nats_broker import Broker, broker

pytestmark = pytest.mark.slow

NUM_KILLS = int(os.environ.get("EMBARK_FOLLOW_KILLS", 3))
BATCH, STEPS_PER_KILL = 48, 10
NUM_STEPS = STEPS_PER_KILL * (NUM_KILLS + 1)
SUBJECT = "events.shown"
BOUND_S = 20.0


def rows(num: int, seed: int) -> list[dict]:
    """One a second, up to `BOUND_S` out of order."""
    chance = random.Random(seed)
    made = []
    for second in range(num):
        user = chance.randrange(301)
        made.append({
            "t": 1.7e9 + second - chance.uniform(0, BOUND_S), "label": int(chance.random() < 0.1 + 0.4 * (user % 2)),
            "user": user, "item": [chance.randrange(100) for _ in range(chance.randrange(4))], "shop": user % 7,
            **{f"dense_{column}": chance.gauss(0, 1) for column in range(4)}})
    return made


@pytest.fixture(scope="module")
def nats(tmp_path_factory) -> Iterator[Broker]:
    with broker(tmp_path_factory.mktemp("nats")) as made:
        # More than the steps need: what is within the bound of the last waits.
        made.publish(SUBJECT, rows((NUM_STEPS + 1) * BATCH, seed=3))
        yield made


def settings(nats: Broker) -> tuple[str, ...]:
    return (f"train.num_steps={NUM_STEPS}", "store.checkpoint_every=2", "stream.source=nats",
            f"stream.servers=['{nats.url}']", f"stream.topics=['{SUBJECT}']", "stream.time_column=t",
            f"stream.bound_s={BOUND_S}")


def told(run: Run, kind: str, *names: str) -> dict[int, set[tuple[str, ...]]]:
    """By step: what the run's events of a kind ever said of it."""
    found: dict[int, set[tuple[str, ...]]] = {}
    for event in run.events(kind):
        found.setdefault(event["step"], set()).add(tuple(str(event[name]) for name in names))
    return found


def test_kills_of_trainer_and_broker_change_no_loss_and_lose_no_record(run, zygote, tmp_path_factory, nats):
    undisturbed = Run(zygote, tmp_path_factory.mktemp("undisturbed"), sets=settings(nats))
    assert undisturbed.ends(1) == [0], undisturbed.output()
    run.sets, chance = settings(nats), random.Random(5)
    for number in range(NUM_KILLS):
        if run.last_step() > NUM_STEPS - 2 * STEPS_PER_KILL:  # a fast machine comes far between two kills
            break
        trainer = run.start(1)
        wanted = run.last_step() + chance.randrange(5)
        if chance.random() < 0.8:
            trainer.until(lambda wanted=wanted: run.last_step() > wanted)
        time.sleep(chance.uniform(0, 0.02))
        if number % 2:
            nats.kill()
            time.sleep(chance.uniform(0, 0.3))
            survives = chance.random() < 0.5
            if not survives:
                trainer.kill(signal.SIGKILL)
            nats.start()
            if survives:  # it goes on when the broker is back
                after = run.last_step()
                trainer.until(lambda after=after: run.last_step() > min(after + 1, NUM_STEPS - 1))
        trainer.kill(signal.SIGKILL)
        trainer.codes()
    assert run.ends(1) == [0], run.output()
    assert run.events("start")[-1]["first_step"] > 0
    assert told(run, "step", "loss", "auc") == told(undisturbed, "step", "loss", "auc")
    assert sorted(run.losses()) == list(range(1, NUM_STEPS + 1))
    reads = told(run, "step", "stream")
    assert reads == told(undisturbed, "step", "stream")
    assert all(len(values) == 1 for values in reads.values())


def assert_as_with_good_rows_alone(run: Run, good: Run) -> None:
    """Start the run, kill it twice on the way, and compare its losses with those of the good rows."""
    for wanted in (3, 9):
        trainer = run.start(1)
        trainer.until(lambda wanted=wanted: run.last_step() > wanted)
        trainer.kill(signal.SIGKILL)
        trainer.codes()
    assert run.ends(1) == [0], run.output()
    assert told(run, "step", "loss", "auc") == told(good, "step", "loss", "auc")
    assert all(len(values) == 1 for values in told(run, "step", "stream").values())
    last = run.events("step")[-1]["stream"]
    assert last["num_unreadable"] > 500
    assert sum(last["dropped"].values()) == last["num_unreadable"] + last["num_late"]
    letters = [json.loads(line) for line in (run.path / "dead_letters.jsonl").read_text().splitlines()]
    assert {letter["reason"] for letter in letters} >= set(last["dropped"])


def test_500_bad_records_and_files_with_kills_change_no_loss(zygote, tmp_path, nats):
    some, bad = rows(14 * BATCH, seed=6), list(RECORDS.values())
    some = sorted(some, key=lambda row: row["t"])
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "0.jsonl").write_text("".join(json.dumps(row) + "\n" for row in some))
    write_files(tmp_path / "all", [some[start : start + 40] for start in range(0, len(some), 40)])
    nats.publish("mixed.shown", [one for at, row in enumerate(some) for one in (row, bad[at % len(bad)])])
    sets = ("train.num_steps=12", "store.checkpoint_every=2", "stream.time_column=t")
    runs = []
    for name, own in (("good", ("stream.source=files", f"stream.path={tmp_path}/in")),
                      ("files", ("stream.source=files", f"stream.path={tmp_path}/all")),
                      ("broker", ("stream.source=nats", f"stream.servers=['{nats.url}']",
                                  "stream.topics=['mixed.shown']"))):
        (tmp_path / name).mkdir(exist_ok=True)
        runs.append(Run(zygote, tmp_path / name, sets=(*sets, *own)))
    assert runs[0].ends(1) == [0], runs[0].output()
    for run in runs[1:]:
        assert_as_with_good_rows_alone(run, runs[0])


def test_sigterm_while_waiting_for_records_saves_and_resumes(run, nats):
    subject = "later.shown"
    some = rows(6 * BATCH, seed=4)
    nats.publish(subject, some[: 3 * BATCH])
    run.sets = (*settings(nats), f"stream.topics=['{subject}']", "stream.bound_s=0", "stream.time_column=''",
                "train.num_steps=6", "store.checkpoint_every=0")
    trainer = run.start(1)
    trainer.until(lambda: run.last_step() >= 1)  # the pipeline holds the next two
    trainer.kill(signal.SIGTERM)
    assert trainer.codes() == [75], run.output()
    assert run.committed()
    nats.publish(subject, some[3 * BATCH :], first=3 * BATCH)
    assert run.ends(1) == [0], run.output()
    assert sorted(run.losses()) == list(range(1, 7))
    assert run.events("step")[-1]["stream"]["num_rows"] == 6 * BATCH
