"""The events of a made-up run, one of every kind."""

from __future__ import annotations

import math
from collections.abc import Callable
from io import StringIO
from typing import Any

import pytest
from rich.console import Console

from embark.events.events import Event
from embark.events.sinks.terminal import TerminalView

START = {
    "name": "demo", "model_kind": "dlrm", "run_dir": "runs/demo", "device": "cuda", "device_name": "NVIDIA H200",
    "world_size": 2, "engine": "pipeline", "engine_reason": "2 ranks", "precision": "fp32", "num_steps": 1000,
    "first_step": 0, "steps_per_epoch": 500, "batch_size": 4096, "num_parameters": 167_234_561,
    "table_bytes": 665_600_000, "num_train_samples": 2_048_000, "num_eval_samples": 100_000,
}


def tables(num: int = 26, ranks: tuple[int, ...] = (0,)) -> list[dict[str, Any]]:
    return [
        {"table": f"cat_{i}", "rows": 100_000, "dim": 64, "sharding": "table_wise", "kernel": "fused",
         "ranks": list(ranks), "bytes": 25_600_000}
        for i in range(num)
    ]  # fmt: skip


def run_events(outcome: str = "done", **last_eval: Any) -> list[Event]:
    """A step event a second, of a thousand steps in fifty."""
    now = 1_700_000_000.0
    events = [
        Event("start", START, now),
        Event("plan", {"tables": tables(), "per_rank": [{"rank": r, "bytes": 332_800_000} for r in (0, 1)]}, now),
        Event("note", {"level": "info", "text": "graph captured"}, now),
    ]
    for step in range(20, 1001, 20):
        now += 1
        loss, auc = 0.45 + 0.24 * math.exp(-step / 200), 0.79 - 0.29 * math.exp(-step / 200)
        measured = {"auc": auc, "normalized_entropy": loss / 0.69, "log_loss": loss, "calibration": 1.01}
        events.append(Event("progress", {"step": step - 10, "loss": loss, "samples_per_s": 41_200.0}, now - 0.5))
        step_values = {"step": step, "epoch": 0, "loss": loss, "learning_rate": 0.1, "samples_per_s": 41_234.0,
                       "step_s": 0.05, **measured}  # fmt: skip
        events.append(Event("step", step_values, now))
        if step % 500 == 0:
            values = {"step": step, "num_samples": 100_000, "eval_s": 1.25, "best_auc": 0.8003, "best_log_loss": 0.4412}
            events.append(Event("eval", {**values, **measured, **(last_eval if step == 1000 else {})}, now))
    events.append(Event("note", {"level": "warning", "text": "data is slow [red]\x1b[31mnow"}, now))
    events.append(Event("save", {"step": 1000, "path": "runs/demo/ckpt", "bytes": 1_340_000_000, "save_s": 2.1}, now))
    if outcome == "interrupted":
        events.append(Event("interrupt", {"step": 1000, "signal": "SIGTERM"}, now))
    if outcome == "failed":
        events.append(Event("error", {"text": "out of memory"}, now))
    end = {"outcome": outcome, "step": 1000, "train_s": 312.4, "samples_per_s": 41_200.0, "num_samples": 4_096_000,
           "run_dir": "runs/demo"}  # fmt: skip
    return [*events, Event("end", end, now)]


@pytest.fixture
def make_events() -> Callable[..., list[Event]]:
    return run_events


@pytest.fixture
def make_tables() -> Callable[..., list[dict[str, Any]]]:
    return tables


@pytest.fixture
def shown() -> Callable[..., str]:
    """What the view wrote of these events."""

    def show(events: list[Event], *, quiet: bool = False, width: int = 100, **options: Any) -> str:
        file = options.pop("file", None) or StringIO()
        view = TerminalView(Console(file=file, width=width, **options), quiet=quiet)
        for event in events:
            view.emit(event)
        view.close()
        return file.getvalue() if isinstance(file, StringIO) else ""

    return show
