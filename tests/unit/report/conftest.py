"""The events of a made-up run that was interrupted twice, and its context."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from embark.catalog.pricing import RunPrice
from embark.diagnose.scan import Diagnosis, Evidence
from embark.events.events import Event
from embark.report.context import RunContext
from embark.report.record import Record
from embark.store.checkpoint_inspect import CheckpointInfo

BEGAN_S = 1_700_000_000.0
START = {
    "name": "demo", "run_dir": "runs/demo", "device": "cuda", "device_name": "NVIDIA H200", "world_size": 4,
    "engine": "cuda_graph", "engine_reason": "the complete step as one CUDA graph", "precision": "bf16",
    "num_steps": 1000, "first_step": 0, "steps_per_epoch": 1000, "batch_size": 4096, "num_parameters": 167_234_561,
    "table_bytes": 665_600_000, "num_train_samples": 4_096_000, "num_eval_samples": 100_000,
    "versions": {"torch": "2.13.0", "torchrec": "1.8.0"},
}
TABLES = [
    {"table": f"cat_{i}", "rows": 100_000, "dim": 64, "sharding": "row_wise" if i == 0 else "table_wise",
     "kernel": "fused", "ranks": [0, 1, 2, 3] if i == 0 else [i % 4], "bytes": 25_600_000}
    for i in range(6)
]  # fmt: skip
GPU = {"index": 0, "util_percent": 97.0, "used_bytes": 60e9, "total_bytes": 140e9, "power_w": 600.0,
       "temperature_c": 61}  # fmt: skip
SYSTEM = {"host": "node-0", "rank": 0, "cpu_percent": 40.0, "resident_bytes": 4e9, "host_used_bytes": 30e9,
          "host_bytes": 200e9, "net_in_bytes_per_s": 1e6, "net_out_bytes_per_s": 2e6, "disk_read_bytes_per_s": 3e6,
          "disk_write_bytes_per_s": 4e6, "gpus": [GPU]}  # fmt: skip


def step(number: int, time_s: float, **values: Any) -> Event:
    loss, auc = 0.45 + 0.24 * math.exp(-number / 200), 0.79 - 0.29 * math.exp(-number / 200)
    fields = {"step": number, "epoch": 0, "loss": loss, "log_loss": loss, "auc": auc, "normalized_entropy": loss / 0.69,
            "calibration": 1.01, "learning_rate": 0.1, "samples_per_s": 41_234.0, "step_s": 0.05}  # fmt: skip
    return Event("step", {**fields, **values}, time_s)


def run_events(num_steps: int = 1000, outcome: str = "done", num_stops: int = 2) -> list[Event]:
    """A point every 20 steps, a second apart. It dies at 340 (saved at 300) and is taken away at 600."""
    now, messages = BEGAN_S, []
    stops = {340: ("", 300), 600: ("SIGTERM", 600)}
    stops = dict(list(stops.items())[:num_stops])

    def begin(first: int) -> None:
        messages.append(Event("start", {**START, "first_step": first}, now))
        per_rank = [{"rank": r, "bytes": 64_000_000} for r in range(4)]
        messages.append(Event("plan", {"tables": TABLES, "per_rank": per_rank}, now))
        predicted = {"step_s": 0.048, "peak_bytes": 60e9, "is_calibrated": True, "bound_by": "lookups",
                     "basis": "measured on NVIDIA H200"}  # fmt: skip
        messages.append(Event("predict", predicted, now))
        if first:
            messages.append(Event("resume", {"step": first, "path": f"ckpt/{first}"}, now))

    begin(0)
    at = 0
    while at < num_steps:
        at += 20
        now += 1
        messages.append(step(at, now))
        times = [0.05, 0.05, 0.09, 0.05]
        messages.append(Event("ranks", {"step": at, "step_s": times, "input_s": [0.01] * 4, "systems": [SYSTEM]}, now))
        messages.append(Event("phases", {"step": at, "seconds": {"input": 0.01, "lookup": 0.03, "dense": 0.01}}, now))
        if at % 100 == 0:
            messages.append(Event("save", {"step": at, "path": f"ckpt/{at}", "bytes": 1.3e9, "save_s": 2.1}, now))
        if at % 200 == 0:
            rows = {"auc": 0.7 + at / 20_000, "log_loss": 0.5 - at / 20_000, "normalized_entropy": 0.8,
                    "calibration": 1.0, "best_auc": 0.8, "best_log_loss": 0.44}  # fmt: skip
            messages.append(Event("eval", {"step": at, "num_samples": 100_000, "eval_s": 1.0, **rows}, now))
        if at in stops:
            signal, back = stops.pop(at)
            if signal:
                messages.append(Event("interrupt", {"step": at, "signal": signal}, now))
                messages.append(Event("end", {"outcome": "interrupted", "step": at}, now))
            now += 30
            at = back
            begin(back)
    if outcome:
        messages.append(Event("end", {"outcome": outcome, "step": num_steps, "train_s": 50.0, "num_samples": 4_096_000,
                                  "samples_per_s": 41_200.0, "step_s": 0.05, "peak_bytes": 61e9}, now))  # fmt: skip
    return messages


def write_run(folder: Path, events: list[Event], spec: str = "") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "events.jsonl").write_text("".join(f"{event.to_json()}\n" for event in events))
    (folder / "spec.toml").write_text(spec or f'name = "{folder.name}"\n[train]\nbatch_size = 4096\n')
    return folder


def diagnosis(text: str = "", **values: Any) -> Diagnosis:
    fields: dict[str, Any] = {
        "code": "x", "name": text or "slow-loader", "kind": "slow", "cause": text or "the loader sets the pace",
        "fix": text or "more workers", "command": text, "evidence": Evidence("events.jsonl", 3, text, (0, 3)),
        "num_lines": 1, "ranks": (), "source": ""}
    return Diagnosis(**{**fields, **values})


def context(events: list[Event], **values: Any) -> RunContext:
    fields: dict[str, Any] = {
        "name": "demo", "uri": "runs/demo", "record": Record(events), "now_s": BEGAN_S + 500,
        "spec": {"name": "demo", "train": {"batch_size": 4096, "learning_rate": 0.01}, "place": {"nodes": 1}},
        "spec_toml": 'name = "demo"\n',
        "price": RunPrice(36.0, "Price: 1 x machine on demand in somewhere, $36.00 an hour."),
        "checkpoints": (CheckpointInfo(1000, "committed", 1_300_000_000, BEGAN_S, metric=0.75, kept=("newest",)),),
        "best_by": "auc", "diagnoses": (diagnosis(),),
    }
    return RunContext(**{**fields, **values})


@pytest.fixture
def make_run() -> Callable[..., list[Event]]:
    return run_events


@pytest.fixture
def make_context() -> Callable[..., RunContext]:
    return context


@pytest.fixture
def make_diagnosis() -> Callable[..., Diagnosis]:
    return diagnosis


@pytest.fixture
def make_folder(tmp_path: Path) -> Callable[..., Path]:
    def make(name: str = "demo", events: list[Event] | None = None, spec: str = "") -> Path:
        return write_run(tmp_path / "runs" / name, run_events() if events is None else events, spec)

    return make


@pytest.fixture
def as_json() -> Callable[[Event], dict[str, Any]]:
    return lambda event: json.loads(event.to_json())
