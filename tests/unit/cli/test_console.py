"""One place prints, and what it prints is safe for a person and for a program."""

import json
import math
import os
import pty
import re
import subprocess
import sys
from dataclasses import dataclass
from enum import Enum
from io import StringIO
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console as RichConsole

from embark.cli.console import Console, JsonView, _print
from embark.errors import Interrupted, Mistake, SpecError, UserError
from embark.events.events import Event
from embark.events.sinks.terminal import TerminalView
from embark.launch.backend import LogLine


def test_an_error_and_its_fix_go_to_stderr_literally(capsys):
    Console().error(UserError("no file [red]x[/red] \x1b[31mhere", fix="name [one] :smile:"))
    out, err = capsys.readouterr()
    assert out == ""
    assert err == "error: no file [red]x[/red] [31mhere\n  fix: name [one] :smile:\n"


def test_a_long_error_is_not_wrapped(capsys):
    Console().error(UserError("x" * 500))
    assert capsys.readouterr().err == "error: " + "x" * 500 + "\n"


def test_all_the_mistakes_of_a_spec_are_reported(capsys):
    mistakes = [Mistake("a.toml:3", f"train.f{i}", "1", "is wrong", "write 2") for i in range(2)]
    Console().error(SpecError(mistakes))
    err = capsys.readouterr().err
    assert err.startswith("error: 2 mistakes in the spec\n  a.toml:3: train.f0 = 1\n    is wrong\n    fix: write 2\n")
    assert "train.f1" in err


def test_an_error_for_a_program(capsys):
    Console(json=True).error(UserError("bad\x1b", fix="better"))
    out, err = capsys.readouterr()
    assert out == ""
    assert json.loads(err) == {"error": "bad", "fix": "better", "exit_code": 64}


ROWS = [
    {"machine": "p5.48xlarge", "num_gpus": 8, "usd_per_hour": 55.04, "fits": True, "note": None},
    {"machine": "laptop [x]", "num_gpus": 0, "usd_per_hour": 0.0, "fits": False, "note": "rows: 1,2"},
    {"machine": "huge", "num_gpus": 12_345, "usd_per_hour": 123_456.7, "fits": False, "note": ["a", "b"]},
]


def test_a_table_for_a_person(capsys):
    Console().table(ROWS, title="Machines")
    lines = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert lines == [
        "Machines",
        "machine      num gpus  usd per hour  fits  note",
        "p5.48xlarge         8         55.04  yes   –",
        "laptop [x]          0             0  no    rows: 1,2",
        "huge           12,345       123,457  no    a, b",
    ]


def test_a_table_in_a_pipe_keeps_its_cells_complete(capsys, monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    path = "s3://bucket/" + "x" * 90
    Console().table([{"path": path, "step": 1}])
    assert path in capsys.readouterr().out


def test_a_table_of_chosen_columns(capsys):
    Console().table(ROWS, columns={"fits": "Fits?", "machine": "Where"})
    assert capsys.readouterr().out.splitlines()[0].split() == ["Fits?", "Where"]


WIDE = [{"name": "a-rather-long-name", "note": "x" * 30, "usd": 1234.5}, {"name": "b", "note": None, "usd": 2}]
WIDE_HEADINGS = {"name": "name", "note": "note", "usd": "dollars an hour"}


@pytest.mark.parametrize(("columns", "has_note"), [(67, True), (66, False)])
def test_a_column_goes_just_when_the_table_would_not_fit(monkeypatch, capsys, columns, has_note):
    monkeypatch.setenv("COLUMNS", str(columns))
    Console().table(WIDE, WIDE_HEADINGS, droppable=["note"])
    out = capsys.readouterr().out
    assert ("x" * 30 in out) is has_note
    assert "a-rather-long-name" in out
    assert "dollars an hour" in out


def test_an_empty_table_says_so(capsys):
    Console().table([], title="Runs")
    assert capsys.readouterr().out == "Runs\nnothing to show\n"


def test_json_is_the_result_and_nothing_else(capsys):
    console = Console(json=True)
    console.text("hello")
    console.result("hello")
    console.show(ROWS, lambda console, rows: console.table(rows))
    out, err = capsys.readouterr()
    assert json.loads(out) == ROWS
    assert err == ""


class Kind(Enum):
    A = "a"


@dataclass(frozen=True)
class Thing:
    path: Path
    loss: float


def test_data_is_json_whatever_it_holds(capsys):
    rows = {
        "thing": Thing(Path("x/y"), math.nan), "kind": Kind.A, "set": {2, 1}, "numpy": np.float32(0.5),
        "array": np.arange(2), "text": "\x1b[31m é",
    }  # fmt: skip
    Console(json=True).show(rows, lambda *_: None)
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert json.loads(out) == {
        "thing": {"path": "x/y", "loss": None}, "kind": "a", "set": [1, 2], "numpy": 0.5, "array": [0, 1],
        "text": "\x1b[31m é",
    }  # fmt: skip


@pytest.mark.parametrize("is_json", [False, True])
def test_a_result_is_rendered_for_a_person_and_dumped_for_a_program(capsys, is_json):
    Console(json=is_json).show(Thing(Path("x/y"), 0.5), lambda console, thing: console.text(f"at {thing.path}"))
    out = capsys.readouterr().out
    assert (json.loads(out) == {"path": "x/y", "loss": 0.5}) if is_json else (out == "at x/y\n")


@pytest.mark.parametrize("is_json", [False, True])
def test_a_line_of_a_log_is_one_line_for_both(capsys, is_json):
    line = LogLine(1_500_000_000, "pod-1", "step 3", 1)
    Console(json=is_json).show_line(line, lambda line: f"{line.source} | {line.text}")
    assert capsys.readouterr().out == (
        '{"time_s": 1.5, "source": "pod-1", "index": 1, "text": "step 3"}\n' if is_json else "pod-1 | step 3\n")


def test_quiet_keeps_results_warnings_and_errors(capsys):
    console = Console(quiet=True)
    console.text("chatter")
    console.result("It fits.")
    console.warning("slow")
    out, err = capsys.readouterr()
    assert (out, err) == ("It fits.\n", "warning: slow\n")


def test_the_view_of_a_run(capsys):
    assert isinstance(Console().view(), TerminalView)
    view = Console(json=True).view()
    view.emit(Event("progress", {"step": 5}, 1.0))
    view.emit(Event("step", {"step": 10, "loss": math.nan, "auc": np.float64(0.5)}, 2.0))
    view.emit(Event("end", {"outcome": "done"}, 3.0))
    view.close()
    lines = [json.loads(line, parse_constant=pytest.fail) for line in capsys.readouterr().out.splitlines()]
    assert lines == [
        {"event": "step", "time_s": 2.0, "rank": 0, "step": 10, "loss": None, "auc": 0.5},
        {"event": "end", "time_s": 3.0, "rank": 0, "outcome": "done"},
    ]


def test_json_lines_to_a_reader_who_is_gone_do_not_end_the_run():
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w") as stream:
        view = JsonView(stream)
        for step in range(3):
            view.emit(Event("step", {"step": step}))
        view.close()
        assert os.readlink(f"/proc/self/fd/{stream.fileno()}") == os.devnull


def test_every_line_of_json_is_flushed():
    class Counting(StringIO):
        flushes = 0

        def flush(self):
            self.flushes += 1

    stream = Counting()
    JsonView(stream).emit(Event("start", {}))
    assert stream.flushes == 1


SAY = "from embark.cli.console import Console; from embark.errors import UserError; Console().error(UserError('no'))"


def said(env, *, terminal):
    """What `SAY` writes to stderr, on a terminal or in a pipe."""
    env = {"PATH": os.environ["PATH"], "PYTHONPATH": os.pathsep.join(sys.path), "TERM": "xterm-256color", **env}
    if not terminal:
        return subprocess.run([sys.executable, "-c", SAY], env=env, capture_output=True, check=True).stderr
    ours, theirs = pty.openpty()
    subprocess.run([sys.executable, "-c", SAY], env=env, stderr=theirs, check=True)
    os.close(theirs)
    return os.read(ours, 4096)


@pytest.mark.parametrize(
    ("env", "terminal", "coloured"),
    [({}, True, True), ({"NO_COLOR": "1"}, True, False), ({}, False, False), ({"FORCE_COLOR": "1"}, False, False)],
)
def test_colour_only_on_a_terminal_and_never_under_no_color(env, terminal, coloured):
    text = said(env, terminal=terminal)
    assert b"no" in text
    assert (b"31m" in text) is coloured


STAGES = """
from embark.cli.console import Console
with Console().stages() as tell:
    tell("reading", 0.25, "1.0 M rows/s")
    tell("writing [x]", 0.5, "0:05 left")
"""


def test_stages_are_a_bar_on_a_terminal():
    ours, theirs = pty.openpty()
    subprocess.run([sys.executable, "-c", STAGES], env={**os.environ, "COLUMNS": "100", "TERM": "xterm"}, stderr=theirs,
                   check=True)
    os.close(theirs)
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", os.read(ours, 65536).decode())
    for word in ("writing [x]", "50%", "0:05 left"):
        assert word in text


def test_stages_are_a_line_now_and_then_in_a_log_and_nothing_for_programs(capsys, monkeypatch):
    monkeypatch.setattr("embark.cli.console._LOG_EVERY_S", 0.0)
    with Console().stages() as tell:
        tell("reading", 0.25, "1.0 M rows/s")
    assert capsys.readouterr().err == "reading 25% 1.0 M rows/s\n"
    monkeypatch.setattr("embark.cli.console._LOG_EVERY_S", 60.0)
    for console in (Console(), Console(json=True), Console(quiet=True)):
        with console.stages() as tell:
            tell("reading", 0.25, "")
        assert capsys.readouterr() == ("", "")


def test_importing_it_brings_neither_rich_nor_torch_nor_numpy():
    code = ("import embark.cli.console, sys; "
            "print([m for m in ('rich', 'torch', 'numpy', 'pydantic') if m in sys.modules])")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_what_a_person_stopped_is_a_sentence_and_no_error(capsys):
    Console().error(Interrupted("stopped by Ctrl-C at step 4 of 9; saved in runs/x",
                                fix="run the same command to resume"))
    Console().error(Interrupted("stopped by Ctrl-C; x is launched", fix="embark cancel x ends it"))
    assert capsys.readouterr().err.splitlines() == [
        "Stopped by Ctrl-C at step 4 of 9; saved in runs/x. Run the same command to resume",
        "Stopped by Ctrl-C; x is launched. embark cancel x ends it"]


def test_no_word_is_broken_at_the_edge_of_a_terminal():
    file = StringIO()
    terminal = RichConsole(file=file, force_terminal=True, width=30, color_system=None, _environ={"TERM": "xterm"})
    fix = "embark train laptop.toml --fresh x " + "y" * 40
    _print(terminal, [("error: ", ""), (f"the tables do not fit\n  fix: {fix}", "")])
    first, second = file.getvalue().rstrip("\n").split("\n")
    assert (first, len(second)) == ("error: the tables do not fit", 30 + 24 + 40)
    assert [second[:30].rstrip(), second[30:60]] == ["  fix: embark train", "  laptop.toml --fresh x " + "y" * 6]
    assert second.split() == ["fix:", "embark", "train", "laptop.toml", "--fresh", "x", "y" * 40]


def test_what_takes_seconds_is_named_on_a_terminal_and_gone_afterwards(monkeypatch):
    class Terminal(StringIO):
        def isatty(self) -> bool:
            return True

    for console, stream, expected in ((Console(), Terminal(), "loading PyTorch …"), (Console(), StringIO(), ""),
                                      (Console(json=True), Terminal(), ""), (Console(quiet=True), Terminal(), "")):
        monkeypatch.setenv("TERM", "xterm")
        monkeypatch.setattr("sys.stderr", stream)
        with console.waiting("loading PyTorch"):
            assert stream.getvalue() == expected
        assert stream.getvalue() == (f"{expected}\r\033[K" if expected else "")

