"""Runs to be watched: folders with events as a trainer writes them, of any length and in any state."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

START = {
    "device": "cuda", "device_name": "NVIDIA H100 80GB HBM3", "world_size": 4, "engine": "pipeline",
    "engine_reason": "4 ranks", "precision": "bf16", "first_step": 0, "steps_per_epoch": 500, "batch_size": 4096,
    "num_parameters": 167_234_561, "table_bytes": 665_600_000, "num_train_samples": 2_048_000,
    "num_eval_samples": 100_000,
}
STEP_S = 0.1


def line(kind: str, time_s: float, **values: Any) -> str:
    return json.dumps({"event": kind, "time_s": round(time_s, 6), "rank": 0, **values}) + "\n"


def step_line(step: int, time_s: float, *, bend: float = 1000.0, **changes: Any) -> str:
    loss = 0.45 + 0.24 * math.exp(-step / bend) + 0.01 * math.sin(step)
    values = {"loss": loss, "auc": 0.8 - 0.3 * math.exp(-step / bend), "normalized_entropy": loss / 0.69,
            "log_loss": loss, "calibration": 1.0, "learning_rate": 0.1, "samples_per_s": 40_960.0, "step_s": STEP_S}
    return line("step", time_s, step=step, epoch=0, **(values | changes))


def ranks_line(step: int, time_s: float, *, num_ranks: int = 4, slow: int | None = None) -> str:
    gpus = [{"index": i, "util_percent": 90.0 - i, "used_bytes": 30e9 + i * 1e9, "total_bytes": 80e9, "power_w": 500.0,
             "temperature_c": 60.0} for i in range(num_ranks)]
    system = {"host": "node-0", "rank": 0, "cpu_percent": 40.0, "resident_bytes": 4e9, "host_used_bytes": 9e9,
              "host_bytes": 64e9, "net_in_bytes_per_s": 1e9, "net_out_bytes_per_s": 2e9,
              "disk_read_bytes_per_s": 3e8, "disk_write_bytes_per_s": 1e7, "gpus": gpus}
    return line("ranks", time_s, step=step, systems=[system],
                step_s=[STEP_S * (1.5 if rank == slow else 1.0) for rank in range(num_ranks)],
                input_s=[STEP_S * (0.5 if rank == slow else 0.02) for rank in range(num_ranks)])


def phases_line(step: int, time_s: float) -> str:
    return line("phases", time_s, step=step, seconds={"input": 0.01, "copy": 0.005, "lookup": 0.02, "all_to_all": 0.03,
                                                      "dense": 0.025, "optimizer": 0.007, "other": 0.003})


def event_lines(
    *, num_steps: int = 200, every: int = 10, first_s: float | None = None, name: str = "demo", ends: bool = True,
    until_step: int | None = None, rich: bool = False,
) -> Iterator[str]:
    """A whole run, the last event just now unless `first_s` says when it began."""
    last = until_step if until_step is not None else num_steps
    now = time.time() - last * STEP_S if first_s is None else first_s
    yield line("start", now, **START, name=name, run_dir=f"runs/{name}", num_steps=num_steps)
    if rich:
        tables = [{"table": f"cat_{i}", "rows": 100_000 * (i + 1), "dim": 64, "sharding": "table_wise",
                   "kernel": "fused", "ranks": [i % 4], "bytes": 25_600_000 * (i + 1)} for i in range(6)]
        rows = [sum(t["bytes"] for t in tables if t["ranks"] == [rank]) for rank in range(4)]
        yield line("plan", now, tables=tables, per_rank=[{"rank": r, "bytes": b} for r, b in enumerate(rows)])
        yield line("predict", now, step_s=0.09, peak_bytes=31e9, is_calibrated=True, bound_by="all_to_all")
    for step in range(every, last + 1, every):
        at = now + step * STEP_S
        yield step_line(step, at, bend=num_steps / 5)
        if rich:
            yield ranks_line(step, at, slow=2)
            yield phases_line(step, at)
        if rich and step % (every * 5) == 0:
            yield line("save", at, step=step, path="x", bytes=1.3e9, save_s=2.1, pause_s=0.1)
            yield line("eval", at, step=step, auc=0.79, log_loss=0.46, normalized_entropy=0.66, calibration=1.0,
                       eval_s=1.2, num_samples=100_000, best_auc=0.81)
    if ends:
        yield line("end", now + last * STEP_S, outcome="done", step=last, run_dir=f"runs/{name}",
                   train_s=last * STEP_S, num_samples=last * 4096, samples_per_s=40_960.0, step_s=STEP_S,
                   peak_bytes=33e9)


def write_run(folder: Path, **result: Any) -> Path:
    """The folder, with `events.jsonl` and a small spec in it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "events.jsonl").write_text("".join(event_lines(**{"name": folder.name, **result})))
    (folder / "spec.toml").write_text(f'name = "run"\n\n[train]\nbatch_size = {START["batch_size"]}\n')
    return folder


def append(folder: Path, *lines: str) -> None:
    with (folder / "events.jsonl").open("a") as file:
        file.write("".join(lines))
