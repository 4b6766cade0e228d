"""One damaged event, or one line that is none, hides no other event from any reader."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from limits import HANG_S
from rich.console import Console as Screen

from embark.dashboard.api import detail, log_lines, metrics_text
from embark.dashboard.runs import Runs, WatchedRun
from embark.diagnose.report import diagnose_targets
from embark.events.events import MAX_LINE_BYTES, Event, parse_event, read_events
from embark.events.metrics import readings
from embark.events.spending import interruptions, losses_sentence, spending
from embark.events.summary import History, costs, metrics, outcome_sentence, paths, predicted_and_actual, tasks, work
from embark.launch.run_registry import stored_events
from embark.rehearse.controller import EventReader
from embark.report.context import read_run
from embark.report.document import html_page
from embark.report.report import report
from embark.report.run_files import RunFiles
from embark.run.open_run import last_finished_step, life_events
from embark.store import RunDir, open_store

SYSTEM = {"host": "h", "cpu_percent": 1.0, "gpus": [{"index": 0, "util_percent": 1.0}]}
TABLE = {"name": "user", "rows": 10, "dim": 4, "bytes": 160, "sharding": "row_wise", "kernel": "fused", "ranks": [0]}
KINDS = {
    "begin": {"attempt": 1, "age_s": 2.0, "usd_per_hour": 36.0, "budget_usd": 10.0, "boot": "b", "uptime_s": 9.0,
              "previous_began_s": 1.0, "previous_ended_s": 2.0, "is_spot": True},
    "start": {"name": "run", "run_dir": "runs/run", "attempt": 1, "first_step": 0, "num_steps": 100, "batch_size": 8,
              "world_size": 1, "device": "cpu", "device_name": "CPU", "usd_per_hour": 36.0, "num_machines": 1,
              "steps_per_epoch": 10, "table_bytes": 160, "num_parameters": 100, "versions": {"embark": "0"},
              "is_fresh": True, "stream": "nats", "age_s": 3.0},
    "plan": {"tables": [TABLE], "per_rank": [{"bytes": 160}], "num_ranks": 1},
    "predict": {"step_s": 0.1, "peak_bytes": 100, "is_calibrated": True, "parts": {"dense": 0.1}},
    "resume": {"step": 1, "path": "x"},
    "change": {"step": 1, "field": "train.seed", "old": 1, "new": 2},
    "warm_start": {"run": "a", "from_step": 3, "num_fresh_rows": 1, "num_rows": 2},
    "step": {"step": 10, "loss": 0.5, "auc": 0.6, "samples_per_s": 10.0, "step_s": 0.1, "epoch": 0, "log_loss": 0.5,
             "tasks": {"click": {"auc": 0.5}}, "id_hit_rate": {"user": 0.5}, "calibration": 1.0},
    "ranks": {"step": 10, "step_s": [0.1], "input_s": [0.1], "own_s": [0.1], "systems": [SYSTEM]},
    "phases": {"step": 10, "seconds": {"dense": 0.1}, "own_s": [0.1]},
    "eval": {"step": 10, "auc": 0.7, "log_loss": 0.4, "num_samples": 100, "best_auc": 0.8, "eval_s": 1.0, "k": 20,
             "tasks": {"click": {"auc": 0.5}}, "recall_at_k": 0.5, "num_users": 7},
    "save": {"step": 10, "bytes": 100, "save_s": 0.1, "path": "x"},
    "note": {"level": "info", "text": "hello"},
    "traffic": {"version": 1, "rows": 10, "requests": 5, "latency": [1, 2], "requests_per_s": 1.0, "columns": {}},
    "serve": {"version": 1, "model": "m", "uri": "u", "url": "v", "columns": [], "reference": {}},
    "version_refused": {"version": 2, "why": "bad"},
    "interrupt": {"step": 10, "signal": "SIGTERM"},
    "error": {"text": "oh"},
    "end": {"step": 10, "outcome": "done", "train_s": 1.0, "samples_per_s": 1.0, "step_s": 0.1, "peak_bytes": 1,
            "spent_usd": 1.0, "lost": "x", "run_dir": "runs/run", "num_samples": 80,
            "early_stopping": {"best": 0.5, "metric": "auc", "best_step": 3, "num_without_improvement": 1}},
}
HOSTILE = ["word", None, float("nan"), float("-inf"), 10**400, -(2**70), 1e308, True, [], {}, [[7]], ["x", None, {}],
           {"a": {"b": ["c"]}}, {"": 1}, "\ud800", "\x1b[31m\u202e", "x" * 5000]
NESTED = "[" * 900 + "]" * 900
BAD_LINES = [
    b"", b"{", b"[]", b"null", b"7", b'"word"', b"\xff\xfe\x00", b"\x00" * 100, b"[" * 100_000,
    b'{"time_s": 5}', b'{"event": "step"}', b'{"event": 7, "time_s": 5}', b'{"event": "step", "time_s": "noon"}',
    b'{"event": "step", "time_s": NaN}', b'{"event": "step", "time_s": 1e300, "step": 3}',
    b'{"event": "step", "time_s": ' + b"9" * 400 + b"}", b'{"event": "step", "time_s": ' + b"9" * 5000 + b"}",
    b'{"event": "step", "time_s": 5, "rank": ' + b"9" * 400 + b', "step": 3}',
    f'{{"event": "step", "time_s": 5, "step": 3, "loss": {NESTED}}}'.encode(),
    b'{"event": "\\ud800", "time_s": 5, "step": 3}', b'{"event": "step", "time_s": 5, "\\udfff": 3}',
]


def line(kind: str, values: object, at: float) -> bytes:
    return json.dumps({"event": kind, "time_s": at, "rank": 0, **values}).encode()


def damaged(kind: str) -> Iterator[bytes]:
    """All events, with each field of one kind damaged in turn in one more event beside the good one."""
    at = 1000.0
    for name, values in KINDS.items():
        if name in ("traffic", "serve", "version_refused") and kind not in ("traffic", "serve", "version_refused"):
            continue  # it would be a server
        at += 1
        yield line(name, values, at)
        if name == kind:
            for field in values:
                for value in HOSTILE:
                    at += 1
                    yield line(name, {**values, field: value}, at)
            at += 1
            yield line(name, {}, at)
            yield line(name, values, at)


def read_everywhere(folder: Path) -> None:
    """Give a run's events to every reader. None raises, and all that they write can be encoded."""
    events = list(read_events(folder / "events.jsonl"))
    assert stored_events(open_store(folder)) == events
    written = [life_events(RunDir(str(folder))), last_finished_step(events)]
    spent = spending(events, usd_per_hour=1.0, now_s=5000.0)
    history = History()
    for event in events:
        history.add(event)
        written += [list(readings(event)), event.to_json()]
    written += [losses_sentence(spent.lost) if spent else "", outcome_sentence(history), work(history), costs(history),
                predicted_and_actual(history), list(paths(history))]
    screen = Screen(file=(folder / "screen").open("w", encoding="utf-8"), width=120)
    screen.print(metrics(history, 120), tasks(history))
    reader = EventReader(folder)
    written.append(reader.read().phase)
    context = read_run(RunFiles(folder), lambda _: None)
    written += [interruptions(context.record.attempts()), html_page(report(context)), context.status.sentence]
    watched = WatchedRun(RunFiles(folder))
    while watched.look(5000.0):
        pass
    written += [json.dumps(detail(watched, 5000.0)), log_lines(watched, file=0, words=""), watched.record.num_bad_lines]
    with Runs(lambda: [RunFiles(folder)]) as runs:
        for run in runs.all():
            while run.look(5000.0):
                pass
        written.append(metrics_text(runs))
    written += diagnose_targets([str(folder)], logs=[]).diagnoses
    str(written).encode()


@pytest.mark.parametrize("kind", KINDS)
def test_a_damaged_event_stops_no_reader(kind, tmp_path):
    (tmp_path / "events.jsonl").write_bytes(b"\n".join(damaged(kind)) + b"\n")
    read_everywhere(tmp_path)
    kinds = [event.kind for event in read_events(tmp_path / "events.jsonl")]
    assert kinds.count(kind) >= 2, "the good ones before and after those that are damaged"
    assert kinds[-1] == [name for name in KINDS if name in kinds][-1], "what follows them is read too"


def test_lines_that_are_no_events_hide_no_event(tmp_path):
    good = [line(name, values, 1000.0 + at) for at, (name, values) in enumerate(KINDS.items())]
    mixed = [one for pair in zip(BAD_LINES, good, strict=False) for one in pair] + good[len(BAD_LINES):]
    (tmp_path / "events.jsonl").write_bytes(b"\n".join(mixed) + b"\n" + BAD_LINES[1])
    kinds = [event.kind for event in read_events(tmp_path / "events.jsonl")]
    assert [kind for kind in kinds if kind in KINDS and kind != "step"] == [kind for kind in KINDS if kind != "step"]
    read_everywhere(tmp_path)


def test_half_a_surrogate_pair_becomes_a_question_mark_and_a_pair_stays():
    event = parse_event(b'{"event": "note", "time_s": 5, "text": "\\ud800 \\ud83d\\ude00"}')
    assert event == Event("note", {"text": "? \U0001f600"}, 5.0)


LIMIT_BYTES = 1 << 30
SCRIPT = """
import resource, sys
from pathlib import Path
from embark.diagnose.report import diagnose_targets
from embark.events.events import read_events
from embark.launch.run_registry import stored_events
from embark.report.context import read_run
from embark.report.run_files import RunFiles
from embark.store import open_store
folder = Path(sys.argv[1])
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for events in (read_events(folder / "events.jsonl"), stored_events(open_store(folder))):
    assert [event.kind for event in events] == ["note", "end"]
assert read_run(RunFiles(folder), lambda _: None, is_brief=True).record.num_events == 2
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def test_a_line_without_an_end_is_not_held_in_memory(tmp_path):
    with (tmp_path / "events.jsonl").open("wb") as file:
        file.write(line("note", {"text": "before"}, 1.0) + b"\n")
        file.seek(LIMIT_BYTES, 1)  # a hole, which takes no space on the disk
        file.write(b"\n" + line("end", {"outcome": "done"}, 2.0) + b"\n")
    done = subprocess.run([sys.executable, "-c", SCRIPT, str(tmp_path)], capture_output=True, text=True, timeout=HANG_S)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) * 1024 < 8 * MAX_LINE_BYTES < LIMIT_BYTES
