"""Records and files that cannot be used are skipped and counted, and the rows around them trained as if alone."""

from __future__ import annotations

import asyncio
import json
import random
from contextlib import closing
from pathlib import Path
from uuid import uuid4

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from integration.faults.conftest import SPEC
from malformed_records import FILES, LARGE, NO_LINES, ODD_FILES, RECORDS, ROW, write_files

from embark.data.loader import Batch
from embark.data.stream import usable
from embark.data.stream.source import StreamSource
from embark.data.stream.usable import DeadLetters
from embark.errors import DataError
from embark.spec import RunSpec, load_spec
from embark.store import Checkpoint, RunDir

BATCH, NUM_STEPS = 48, 12


def good_rows(num: int, seed: int = 0) -> list[dict]:
    chance = random.Random(seed)
    return [{"t": 1.7e9 + number, "label": chance.randrange(2), "user": chance.randrange(301),
             "shop": chance.randrange(7), "item": [chance.randrange(100) for _ in range(chance.randrange(4))],
             **{f"dense_{column}": chance.gauss(0, 1) for column in range(4)}} for number in range(num)]


def spec_of(folder: Path, **stream: object) -> RunSpec:
    path = folder / f"{uuid4().hex}.toml"
    values = {"source": "files", "time_column": "t", **stream}
    lines = [f"{name} = {json.dumps(value)}\n" for name, value in values.items()]
    path.write_text(f"{SPEC}\n[stream]\n{''.join(lines)}")
    return load_spec(str(path))


def take(source: StreamSource, num: int, first: int = 0) -> list[Batch]:
    return [source.train_rows(0, step * BATCH, (step + 1) * BATCH) for step in range(first, first + num)]


def assert_same(found: list[Batch], expected: list[Batch]) -> None:
    for one, other in zip(found, expected, strict=True):
        for field in ("dense", "ids", "lengths", "label"):
            assert np.array_equal(getattr(one, field), getattr(other, field)), field


@pytest.fixture(scope="module")
def rows() -> list[dict]:
    return good_rows((NUM_STEPS + 1) * BATCH)


@pytest.fixture(scope="module")
def expected(rows, tmp_path_factory) -> list[Batch]:
    folder = tmp_path_factory.mktemp("good")
    (folder / "0.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with closing(StreamSource(spec_of(folder, path=str(folder)))) as source:
        return take(source, NUM_STEPS)


def mixed(rows: list[dict]) -> list[bytes]:
    """A bad record behind each good one: more than 500, of each form several."""
    bad = list(RECORDS.values())
    return [record for number, row in enumerate(rows) for record in (json.dumps(row).encode(), bad[number % len(bad)])]


def assert_letters(path: Path, state: dict) -> list[dict]:
    letters = [json.loads(line) for line in path.read_text().splitlines()]
    assert {letter["reason"] for letter in letters} == set(state["dropped"])
    assert sum(state["dropped"].values()) == state["num_unreadable"] + state["num_late"]
    return letters


def follow(spec: RunSpec, expected: list[Batch], folder: Path, num_steps: int = NUM_STEPS) -> dict:
    """Compare all batches, read in several starts, each from the checkpoint of the one before it."""
    run_dir, step = RunDir(str(folder)), 0
    for num in (1, 3, 2, 4, num_steps):
        with closing(StreamSource(spec)) as source:
            source.letters = DeadLetters(folder / "dead_letters.jsonl")
            if step:
                source.restore(run_dir.checkpoints, Checkpoint(step, {"stream.json": None}, {}))  # type: ignore[dict-item]
            first, step = step, min(step + num, num_steps)
            found = take(source, step - first, first)
            if step < num_steps:
                found += take(source, 1, step)  # it has read ahead of its checkpoint
                state_file = source.checkpoint_files(step)["stream.json"]
                run_dir.checkpoints.store.write(f"step-{step:09d}/stream.json", state_file)
            assert_same(found, expected[first : first + len(found)])
            state = source.status(step)
    return state


def test_there_are_many_forms():
    assert len(RECORDS) + len(FILES) + len(ODD_FILES) > 100


def test_bad_lines_and_files_change_no_batch(rows, expected, tmp_path):
    size = -(-len(rows) // 20)
    num_bad = write_files(tmp_path / "in", [rows[i : i + size] for i in range(0, len(rows), size)])
    assert num_bad > 500
    spec = spec_of(tmp_path, path=str(tmp_path / "in"))
    state = follow(spec, expected, tmp_path)
    letters = assert_letters(tmp_path / "dead_letters.jsonl", state)
    assert len({(letter["partition"], *letter["offset"]) for letter in letters}) == len(letters)
    with closing(StreamSource(spec)) as source:
        take(source, NUM_STEPS)
        assert source.status(NUM_STEPS) == state
    named = {letter["offset"][0].partition("-odd-")[2][4:] for letter in letters if "-odd-" in letter["offset"][0]}
    assert named >= {*FILES, "within.jsonl"}


def test_a_verdict_depends_on_the_record_alone(rows, tmp_path):
    """One by one, as a broker may send them, and each alone among good ones."""
    bad = [record for record in RECORDS.values() if b"\n" not in record]
    with closing(StreamSource(spec_of(tmp_path, path=str(tmp_path)))) as source:
        check = source._check.check
        good = [usable.Message(-1, json.dumps(row).encode()) for row in rows[:3]]
        messages = [usable.Message(number, record) for number, record in enumerate(bad)]
        at_once = [message.why for message in check([*good, *messages])[3:]]
        alone = [check([message])[0].why for message in messages]
        among = [[one.why for one in check([*good, message, *good])] for message in messages]
    assert at_once == alone
    assert [whys.pop(3) for whys in among] == alone
    assert not any(why for whys in among for why in whys)


@given(st.recursive(st.none() | st.booleans() | st.integers() | st.floats()
                    | st.text(st.characters(codec=None), max_size=9),
                    lambda some: st.lists(some, max_size=3) | st.dictionaries(st.text(max_size=3), some, max_size=3)),
       st.sampled_from([*ROW, "other"]))
@settings(max_examples=150, deadline=None)
def test_any_json_value_is_used_or_skipped(checker, value, column):
    good, odd = json.dumps(ROW).encode(), json.dumps({**ROW, column: value}).encode()
    first, verdict, last = checker([usable.Message(number, record) for number, record in enumerate((good, odd, good))])
    assert (first.why, last.why) == ("", "")
    assert checker([usable.Message(1, odd)])[0].why == verdict.why


@pytest.fixture(scope="module")
def checker(tmp_path_factory):
    folder = tmp_path_factory.mktemp("any")
    return StreamSource(spec_of(folder, path=str(folder)))._check.check


def test_ids_with_0x_are_read_alike_among_any_others(checker):
    hexadecimal, other = ({**ROW, "user": user} for user in ("0x1F", "u7"))
    for rows in ([hexadecimal], [hexadecimal, other], [ROW, hexadecimal, other]):
        found = checker([usable.Message(0, json.dumps(row).encode()) for row in rows])
        assert [message.why for message in found if message.value["user"] == "0x1F"] == [""]


def test_bad_records_of_nats_change_no_batch(rows, expected, tmp_path):
    nats = pytest.importorskip("nats")
    from nats_broker import broker

    async def publish(url: str) -> None:
        client = await nats.connect(url)
        await client.jetstream().add_stream(name="A", subjects=["a.>"])
        sent = [client.jetstream().publish_async("a.shown", record) for record in mixed(rows)]
        for one in sent:
            await (await one)
        await client.close()

    with broker(tmp_path / "nats") as made:
        asyncio.run(publish(made.url))
        spec = spec_of(tmp_path, source="nats", servers=[made.url], topics=["a.shown"])
        state = follow(spec, expected, tmp_path)
    letters = assert_letters(tmp_path / "dead_letters.jsonl", state)
    assert state["num_unreadable"] + state["num_late"] >= NUM_STEPS * BATCH - 1
    assert all(letter["offset"] % 2 == 0 for letter in letters)  # the good ones have odd numbers


def test_bad_records_of_kafka_change_no_batch(rows, expected, tmp_path):
    kafka = pytest.importorskip("confluent_kafka")
    producer = kafka.Producer({"test.mock.num.brokers": 1, "bootstrap.servers": "none", "log_level": 0})
    brokers = producer.list_topics(timeout=60).brokers.values()
    for number, record in enumerate(mixed(rows)):
        producer.produce("shown", record or None, partition=number % 4)
    last = json.dumps({**ROW, "t": 1.7e9 + len(rows) + 99}).encode()
    for partition in range(4):
        producer.produce("shown", last, partition=partition)
    assert producer.flush(60) == 0
    spec = spec_of(tmp_path, source="kafka", servers=[f"{one.host}:{one.port}" for one in brokers], topics=["shown"])
    state = follow(spec, expected, tmp_path)
    assert_letters(tmp_path / "dead_letters.jsonl", state)
    assert state["num_unreadable"] + state["num_late"] >= NUM_STEPS * BATCH // 2


OWN = """
import datetime, decimal, json, pathlib
RECORDS = [eval(line) for line in pathlib.Path({path!r}).read_text().splitlines()]
ODD = [None, 17, [1], {{}}, {{"t": datetime.datetime(2024, 1, 1)}}, object(), "text", "", {{1: 2}},
       {{"user": {{1, 2}}}}, {{"t": decimal.Decimal(17)}}, b"", {{"t": 1.7e9, "label": 1, "user": b"7"}}]
class Source:
    def __init__(self, stream):
        pass
    def poll(self, offset, timeout_s):
        first = 0 if offset is None else offset + 1
        every = [one for n, record in enumerate(RECORDS) for one in (record, ODD[n % len(ODD)])]
        return list(enumerate(every))[first : first + 300]
"""


def test_bad_records_of_own_code_change_no_batch(rows, expected, tmp_path):
    path = tmp_path / "records.txt"
    path.write_text("".join(f"{record!r}\n" for record in mixed(rows)))
    spec = spec_of(tmp_path, source="custom_stream:Source", code=OWN.format(path=str(path)))
    state = follow(spec, expected, tmp_path)
    assert_letters(tmp_path / "dead_letters.jsonl", state)
    assert state["num_unreadable"] >= 2 * NUM_STEPS * BATCH


def test_a_record_of_many_megabytes_is_skipped(rows, expected, tmp_path):
    (tmp_path / "in").mkdir()
    lines = [json.dumps(row).encode() for row in rows]
    (tmp_path / "in" / "0.jsonl").write_bytes(b"\n".join([lines[0], LARGE, *lines[1:]]) + b"\n")
    with closing(StreamSource(spec_of(tmp_path, path=str(tmp_path / "in")))) as source:
        assert_same(take(source, 2), expected[:2])
        assert source.status(2)["dropped"] == {"larger than 16 MiB": 1}


def test_labels_and_rows_that_cannot_be_used_join_nothing(tmp_path):
    shown = [{**{name: cell for name, cell in row.items() if name != "label"}, "k": number}
             for number, row in enumerate(good_rows(3 * BATCH))]
    clicks = [{"t": 1.7e9 + number, "k": number, "label": 1} for number in range(0, 3 * BATCH, 3)]
    good = sorted([*shown, *clicks], key=lambda row: row["t"])
    bad = [{"t": 1.7e9, "k": 4, "label": "maybe"}, {"t": 1.7e9, "k": 4, "label": [1]}, {"t": 1.7e9, "label": 1},
           {"t": 1.7e9, "k": 4, "user": "x"}, {"t": 1.7e9, "k": 4}, {"t": 1.7e9, "k": 1, "label": 7}]
    found = []
    for name, some in (("good", good), ("all", [*good[:1], *bad, *good[1:]])):
        (tmp_path / name).mkdir()
        (tmp_path / name / "0.jsonl").write_text("".join(json.dumps(row) + "\n" for row in some))
        spec = spec_of(tmp_path, path=str(tmp_path / name), key="k", label_window_s=5.0)
        with closing(StreamSource(spec)) as source:
            found.append(take(source, 2))
            state = source.status(2)
    assert_same(found[1], found[0])
    assert state["num_unreadable"] == len(bad)


def test_a_share_that_the_spec_sets_stops_the_run(rows, tmp_path):
    (tmp_path / "in").mkdir()
    records = [json.dumps(row).encode() for row in rows * 3]
    records[100:100] = [b"x"] * 20  # a burst is no reason
    (tmp_path / "in" / "0.jsonl").write_bytes(b"\n".join(records[:1500] + [b"x"] * 700 + records[1500:]))
    for share, is_fine in ((0.5, False), (1.0, True)):
        spec = spec_of(tmp_path, path=str(tmp_path / "in"), max_dropped_share=share, time_column="")
        with closing(StreamSource(spec)) as source:
            source.letters = DeadLetters(tmp_path / "dead_letters.jsonl")
            take(source, 14)
            if is_fine:
                take(source, 20, 14)
                continue
            with pytest.raises(DataError, match=r"stream\.max_dropped_share = 0\.5: not a JSON object") as caught:
                take(source, 20, 14)
            assert str(tmp_path / "dead_letters.jsonl") in caught.value.fix


def test_dead_letters_are_few_whole_and_never_fail(tmp_path, monkeypatch):
    path = tmp_path / "dead_letters.jsonl"
    letters = DeadLetters(path)
    for number in range(1, 2_500):
        letters.add("p", usable.Message(number, b"\xff" * 10_000), "why", number)
    assert [json.loads(line)["offset"] for line in path.read_text().splitlines()] == [*range(1, 21), 1_000, 2_000]
    DeadLetters(path).add("p", usable.Message(3, b"\xff" * 10_000), "why", 3)  # again, after a restart
    assert len(path.read_text().splitlines()) == 22
    monkeypatch.setattr(usable, "MAX_LETTERS_BYTES", 20_000)
    for number in range(100):
        DeadLetters(path).add("p", usable.Message(number, b"x" * 900), f"why {number}", 1)
    assert path.stat().st_size <= 20_000
    assert json.loads(path.read_text().splitlines()[-1])["offset"] == 99
    path.unlink()
    path.mkdir()
    assert DeadLetters(path).add("p", usable.Message(1, b"x"), "why", 1)


def test_every_form_of_record_is_skipped(checker):
    used = [name for name, record in RECORDS.items() if not checker([usable.Message(0, record)])[0].why]
    assert set(used) <= {name for name in RECORDS if "time" in name or "year" in name or "month" in name}
    assert set(RECORDS) >= NO_LINES
