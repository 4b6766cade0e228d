"""Runs live in a terminal: what matters fits any size, moves as events come, and leaves cleanly."""

from __future__ import annotations

import time
from collections.abc import Callable
from io import BytesIO, StringIO, TextIOWrapper
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from rich.screen import Screen

from embark.catalog.pricing import RunPrice
from embark.dashboard import runs as runs_module
from embark.dashboard.terminal import View, screen, watch_terminal
from embark.events.events import Event
from embark.events.sinks.terminal import Encoded
from embark.report.context import status_of
from embark.report.record import Record
from embark.report.run_files import RunFiles

BEGAN_S = 1_700_000_000.0


def gpu(used: float = 60e9) -> dict[str, float]:
    return {"util_percent": 97, "used_bytes": used, "total_bytes": 80e9, "power_w": 600, "temperature_c": 61}


def events(num: int = 50, *, num_steps: int = 100, began_s: float = BEGAN_S, end: str = "", loss: float | None = 0.5):
    run_events = [Event("start", {"name": "demo", "device": "cuda", "device_name": "NVIDIA H200", "world_size": 8,
                            "precision": "bf16", "num_steps": num_steps, "batch_size": 64}, began_s)]
    for n in range(1, num + 1):
        values = {"step": n, "loss": None if loss is None else loss + 1 / n, "auc": 0.8 - 0.3 / n, "step_s": 1.0,
                  "normalized_entropy": 0.8, "samples_per_s": 41_000.0}
        run_events.append(Event("step", values, began_s + n))
    times = [0.05] * 7 + [0.09]
    system = {"host": "a", "cpu_percent": 40, "host_used_bytes": 30e9, "host_bytes": 60e9, "net_in_bytes_per_s": 1e6,
              "gpus": [gpu(79e9), gpu()]}
    run_events.append(Event("ranks", {"step": num, "step_s": times, "systems": [system]}, began_s + num))
    run_events.append(Event("eval", {"step": num, "auc": 0.77, "log_loss": 0.45}, began_s + num))
    run_events.append(Event("save", {"step": num, "path": "x", "bytes": 1.5e9, "save_s": 2.0}, began_s + num))
    run_events.append(Event("note", {"level": "warning", "text": "data is slow \x1b[31m[red]now"}, began_s + num))
    if end:
        run_events.append(Event("end", {"outcome": end, "step": num, "samples_per_s": 41_000.0}, began_s + num))
    return run_events


def view(run_events: list[Event], silent_s: float = 1.0, name: str = "demo", usd_per_hour: float | None = 36.0) -> View:
    record = Record(run_events)
    now_s = (record.last_s or BEGAN_S) + silent_s
    status = status_of(record, now_s)
    return View(name, record, status, record.spending(usd_per_hour, now_s if status.state == "running" else None))


def shown(views: list[View], width: int = 80, height: int = 24, **options: Any) -> str:
    file = StringIO()
    console = Console(file=file, width=width, height=height, color_system=None, legacy_windows=False)
    console.print(Screen(Encoded(screen(views, width, height, **options))))
    return file.getvalue()


def test_one_run_says_all_that_matters_on_a_small_terminal():
    text = shown([view(events())])
    for result in ("demo", "running", "NVIDIA H200 · 8 ranks · bf16", "step  50/100", "left", "loss 0.5200",
                 "log loss 0.4500", "AUC 0.7940", "AUC 0.7700", "41.0 k samples/s", "rank 7 slow: 90.0 ms",
                 "step 50 · 1.50 GB", "$0.51 spent", "to go", "2 GPUs", " 97 %", " 99 %", "61 °C", "CPU", " 50 %",
                 "in 1.00 MB/s", "data is slow [31m[red]now", "Ctrl-C"):
        assert result in text, f"{result}\n{text}"
    assert "\x1b" not in text


@pytest.fixture(autouse=True)
def quick_reading(monkeypatch):
    monkeypatch.setattr(runs_module, "LOOK_S", 0.02)
    monkeypatch.setattr(runs_module, "FIND_S", 0.05)


@pytest.mark.parametrize("size", [(20, 5), (40, 12), (80, 24), (100, 30), (120, 50), (300, 100)])
@pytest.mark.parametrize("num_runs", [0, 1, 2, 7, 60])
def test_it_is_no_larger_than_the_terminal(size, num_runs):
    width, height = size
    views = [view(events(end="done" if n % 2 else ""), name=f"a-rather-long-name-of-run-{n}") for n in range(num_runs)]
    lines = shown(views, width, height).splitlines()
    assert len(lines) <= height
    assert max(map(len, lines)) <= width


def test_several_runs_are_rows_with_their_states():
    views = [view(events(), name="one"), view(events(100, end="done"), name="two"),
             view(events(), 9999, name="three"), view([], name="four")]
    lines = shown(views, 120, 40).splitlines()
    states = {"one": "running", "two": "finished", "three": "killed", "four": "not started"}
    for name, state in states.items():
        row = next(line for line in lines if line.startswith(name))
        assert state in row
    assert "50/100" in lines[2]
    assert any("NVIDIA H200" in line for line in lines)  # the one that runs, in full below


def test_the_checkpoint_that_early_stopping_kept_stands_for_its_run():
    kept = {"metric": "auc", "best": 0.77, "best_step": 50, "path": "runs/demo/checkpoints/step-000000050"}
    stopped = [*events(), Event("eval", {"step": 60, "auc": 0.71, "log_loss": 0.6}, BEGAN_S + 60),
               Event("end", {"outcome": "done", "step": 60, "early_stopping": kept}, BEGAN_S + 61)]
    lines = shown([view(stopped, name="one"), view(stopped, name="two")], 120, 40).splitlines()
    rows = [line for line in lines if line.startswith(("one", "two")) and "60/100" in line]
    assert ["0.7700" in row for row in rows] == [True, True]
    assert any("held out log loss 0.4500 · AUC 0.7700" in line for line in lines)


def test_a_killed_run_is_shown_as_such_with_its_way_back():
    text = shown([view(events(), 7200.0)], 140)
    assert "killed" in text
    assert "No sign of life for 2 h 00 min" in text
    assert "Run the same command to resume from step 50." in text


def test_interruptions_are_reported():
    stopped = [*events(), Event("interrupt", {"step": 50, "signal": "SIGTERM"}, BEGAN_S + 50),
               *events(60, began_s=BEGAN_S + 100)]
    assert "lost     preempted once" in shown([view(stopped)], 120, 40)


@pytest.mark.parametrize("height", [10, 24, 40])
def test_a_loss_that_is_no_number_is_reported(height):
    assert "loss NaN" in shown([view(events(loss=None))], height=height)


def test_letters_that_the_terminal_has_not_are_not_used():
    raw = BytesIO()
    file = TextIOWrapper(raw, encoding="ascii")
    Console(file=file, width=120, color_system=None).print(
        Encoded(screen([view(events()), view(events(), name="b")], 120, 40, ascii_only=True)))
    file.flush()
    assert "running" in raw.getvalue().decode("ascii")


class Terminal:
    """A console that takes itself for a terminal, and what it has shown."""

    def __init__(self, on_terminal: bool = True) -> None:
        self.file = StringIO()
        self.console = Console(file=self.file, width=80, height=24, force_terminal=on_terminal, color_system=None,
                               legacy_windows=False, _environ={})

    @property
    def text(self) -> str:
        return self.file.getvalue()


def write(folder: Path, run_events: list[Event], mode: str = "w") -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "events.jsonl").open(mode) as file:
        file.writelines(f"{event.to_json()}\n" for event in run_events)


def append(folder: Path, text: str) -> None:
    with (folder / "events.jsonl").open("a") as file:
        file.write(text)


def after(*steps: Callable[[], None]) -> Callable[[], bool]:
    """Does one step each time it is asked, after giving the screen time to be drawn; then says that it is enough."""
    left = list(steps)
    requests = 0

    def until() -> bool:
        nonlocal requests
        requests += 1
        if requests % 20:
            return False
        if not left:
            return True
        left.pop(0)()
        return False

    return until


def test_the_terminal_view_moves_as_events_come(tmp_path):
    now_s = time.time() - 50
    first, more = events(40, began_s=now_s), events(50, began_s=now_s)[41:51]
    write(tmp_path / "demo", first)
    terminal = Terminal()
    half = more[0].to_json()
    steps = (lambda: append(tmp_path / "demo", half[:30]), lambda: append(tmp_path / "demo", half[30:] + "\n"),
             lambda: write(tmp_path / "demo", more[1:], "a"))
    watch_terminal(lambda: [RunFiles(tmp_path / "demo")], console=terminal.console, every_s=0.02, until=after(*steps))
    found = [terminal.text.find(f"step  {step}/100") for step in (40, 41, 50)]
    assert -1 < found[0] < found[1] < found[2]
    assert "demo: Running: step 50 of 100" in terminal.text.rstrip().splitlines()[-1]


def test_ctrl_c_leaves_cleanly_and_gives_the_screen_back(tmp_path):
    write(tmp_path / "demo", events(began_s=time.time() - 50))
    terminal = Terminal()

    def interrupt() -> bool:
        raise KeyboardInterrupt

    watch_terminal(lambda: [RunFiles(tmp_path / "demo")], console=terminal.console, until=interrupt)
    assert "\x1b[?1049h" in terminal.text
    assert terminal.text.rindex("\x1b[?1049l") > terminal.text.rindex("\x1b[?1049h")
    assert "\x1b[?25h" in terminal.text  # the cursor is back


def test_it_ends_by_itself_when_all_runs_are_finished(tmp_path):
    write(tmp_path / "demo", events(100, end="done"))
    terminal = Terminal()
    watch_terminal(lambda: [RunFiles(tmp_path / "demo")], console=terminal.console, every_s=0.01)
    assert "demo: Held-out AUC 0.7700" in terminal.text


def test_in_a_pipe_it_is_reported_once(tmp_path):
    write(tmp_path / "demo", events(100, end="done"))
    pipe = Terminal(on_terminal=False)
    watch_terminal(lambda: [RunFiles(tmp_path / "demo")], console=pipe.console)
    assert pipe.text.splitlines()[0] == "demo: finished"
    assert "\x1b" not in pipe.text


def test_a_run_that_is_deleted_and_one_that_comes_are_seen(tmp_path):
    now_s = time.time() - 50
    write(tmp_path / "old", events(began_s=now_s))
    terminal = Terminal()

    def find() -> list[RunFiles]:
        return [RunFiles(path) for path in sorted(tmp_path.iterdir())]

    def remove() -> None:
        (tmp_path / "old" / "events.jsonl").unlink()
        (tmp_path / "old").rmdir()

    steps = (lambda: write(tmp_path / "young", events(30, began_s=now_s)), remove)
    watch_terminal(find, console=terminal.console, every_s=0.02, until=after(*steps))
    assert "young" in terminal.text
    assert "files deleted" in terminal.text


def test_the_price_comes_from_the_spec(tmp_path, monkeypatch):
    write(tmp_path / "demo", events(100, end="done"))
    (tmp_path / "demo" / "spec.toml").write_text("[place]\nnodes = 3\n")
    seen: list[int] = []
    monkeypatch.setattr(runs_module, "price_of_run",
                        lambda spec, _start: (seen.append(spec.place.nodes), RunPrice(36.0))[1])
    pipe = Terminal(on_terminal=False)
    watch_terminal(lambda: [RunFiles(tmp_path / "demo")], console=pipe.console)
    assert set(seen) == {3}
    assert "cost     $1.00 spent" in pipe.text
