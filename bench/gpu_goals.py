"""What the captured step, start-up, input and plan are to reach on one GPU, measured one after the other.

    python bench/gpu_goals.py --out goals.jsonl [--minutes 9] [--only start,step] [--tiny]

Each measurement is a command or several, with time limits; its results are lines of the file. What is in the file is
not measured again: where a command may run for ten minutes, run it three times. `--tiny` tries all of it on a CPU with
small sizes; its figures say nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from embark.cli.console import Console

BENCH = Path(__file__).parent
SGD = ("train.dense_optimizer=sgd", "data.zipf_exponent=0", "train.learning_rate=0.01")
TINY = ("place.device=cpu", "train.precision=fp32", "model.tables=[]", "model.num_tables=3", "model.rows_per_table=500",
        "model.embedding_dim=8", "model.bottom_mlp=[16,8]", "model.top_mlp=[16]")
SHAPES = (("quickstart", 2048, 18e6), ("quickstart", 65536, 50e6), ("criteo-1tb", 2048, 11e6),
          ("criteo-1tb", 65536, 24e6), ("mlperf-dcnv2", 65536, 4e6), ("mlperf-dcnv2", 8192, 3.6e6))
UNSEEN = "220:260"


@dataclass(frozen=True, slots=True)
class Result:
    """One figure beside its goal."""

    what: str
    goal: str
    measured: str
    is_reached: bool | None  # None: nothing was measured.


@dataclass(frozen=True, slots=True)
class Place:
    """Where measurements run."""

    folder: Path
    is_tiny: bool
    until_s: float

    def run(self, words: list[str], limit_s: float) -> str:
        """The command's output. A command that outlasts its limit or the budget is ended."""
        limit_s = min(limit_s, self.until_s - time.monotonic())
        env = {**os.environ, "XDG_CACHE_HOME": str(self.folder / "cache")}
        env.pop("TRITON_CACHE_DIR", None)
        done = subprocess.run([sys.executable, *words], env=env, capture_output=True, text=True, timeout=limit_s)
        if done.returncode:
            raise RuntimeError(f"{' '.join(words)}: {(done.stderr or done.stdout).strip()[-600:]}")
        return done.stdout

    def embark(self, words: list[str], settings: tuple[str, ...], limit_s: float) -> str:
        settings += TINY if self.is_tiny else ()
        return self.run(["-m", "embark", *words, *(w for s in settings for w in ("--set", s))], limit_s)

    def size(self, full: int, tiny: int) -> int:
        return tiny if self.is_tiny else full


def start(place: Place) -> Iterator[Result]:
    """20 steps from the command line; the first time with nothing compiled."""
    shutil.rmtree(place.folder / "cache", ignore_errors=True)
    for what, goal_s in (("cold", 18.0), ("warm", 11.0)):
        settings = ("train.num_steps=20", "data.num_eval_samples=2048", f"store.root={place.folder / 'runs'}",
                    *(("train.batch_size=64",) if place.is_tiny else ()))
        began = time.monotonic()
        place.embark(["train", "quickstart", "--fresh", "--quiet"], settings, 120)
        took_s = time.monotonic() - began
        yield Result(f"20 steps, {what}", f"≤ {goal_s:g} s", f"{took_s:.1f} s", took_s <= goal_s)


def train(place: Place) -> Iterator[Result]:
    """What a person sees: windows of the log after the first second."""
    for batch, num_steps, goal in ((2048, 39_000, 8e6), (65536, 4_500, 30e6)):
        root = place.folder / f"runs-{batch}"
        shutil.rmtree(root, ignore_errors=True)
        num_steps, batch_size = place.size(num_steps, 60), place.size(batch, 64)
        place.embark(["train", "quickstart", "--fresh", "--quiet"], (
            *SGD, f"train.batch_size={batch_size}", f"train.num_steps={num_steps}", f"store.root={root}",
            f"watch.every={place.size(250, 10)}", f"data.num_train_samples={num_steps * batch_size}",
            f"data.num_eval_samples={place.size(131072, 64)}", "store.checkpoint_at_end=false"), 120)
        events = [json.loads(line) for line in (root / "quickstart" / "events.jsonl").read_text().splitlines()]
        steps = [event for event in events if event["event"] == "step"]
        later = [e["samples_per_s"] for e in steps if e["time_s"] > steps[0]["time_s"] + 1] or [
            steps[-1]["samples_per_s"]]
        rate = statistics.median(later)
        yield Result(f"embark train quickstart, batch {batch:,}", f"≥ {goal / 1e6:g} M/s",
                     f"{rate / 1e6:.2f} M/s ({min(later) / 1e6:.2f} to {max(later) / 1e6:.2f})", rate >= goal)


def step(preset: str, batch: int, goal: float, place: Place) -> Iterator[Result]:
    """Beside stock TorchRec at its better precision, in one run."""
    settings = (*SGD, "data.num_train_samples=1100000", "train.optimizer=rowwise_adagrad")
    rows = bench_rows(place, [preset], settings, batch, limit_s=170)
    ours = rows[-1]["samples_per_s"]
    stock = max((row["samples_per_s"] for row in rows[:-1]), default=float("nan"))
    yield Result(f"step, {preset}, batch {batch:,}", f"≥ {goal / 1e6:g} M/s",
                 f"{ours / 1e6:.2f} M/s, {ours / stock:.1f}× stock", ours >= goal)


def options(place: Place) -> Iterator[Result]:
    """fp16 tables and Adam beside the pipeline engine with the same."""
    for what, settings in (("fp16 tables", "train.table_dtype=fp16"), ("Adam", "train.optimizer=adam")):
        if place.is_tiny and what == "Adam":  # FBGEMM has none on a CPU
            settings = "train.optimizer=adagrad"
        rates = [bench_rows(place, ["quickstart", "--no-peers"],
                            (*SGD, "data.num_train_samples=200000", settings, f"train.engine={engine}"), 2048,
                            limit_s=70)[-1]["samples_per_s"] for engine in ("auto", "pipeline")]
        ratio = rates[0] / rates[1]
        yield Result(f"{what}, cuda_graph over pipeline, batch 2,048", "≥ 5×",
                     f"{ratio:.1f}× ({rates[0] / 1e6:.2f} and {rates[1] / 1e6:.2f} M/s)", ratio >= 5)


def shuffle(place: Place) -> Iterator[Result]:
    """Rows in random order from disk, beside batches from memory."""
    data, num_samples = place.folder / "prepared", place.size(6_000_000, 4000)
    place.embark(["data", "make", "quickstart", "--out", str(data)],
                 (f"data.num_train_samples={num_samples}", "data.zipf_exponent=0"), 200)
    rows = bench_rows(place, ["quickstart", "--no-peers"],
                      (*SGD, "data.kind=prepared", f"data.path={data}", "data.shuffle=rows"), 65536, limit_s=120)
    memory, disk = (row["samples_per_s"] for row in rows)
    yield Result('shuffle = "rows" from disk over memory, batch 65,536', "≥ 90 %",
                 f"{disk / memory:.0%} ({disk / 1e6:.1f} of {memory / 1e6:.1f} M/s)", disk >= 0.9 * memory)


def plan(place: Place) -> Iterator[Result]:
    """Specs that no calibration was fitted to. What is measured when the time is over counts."""
    file, seeds = place.folder / "unseen.csv", "220:222" if place.is_tiny else UNSEEN
    words = ["--device", "cpu" if place.is_tiny else "cuda", "--seeds", seeds]
    script = str(BENCH / "random_plan.py")
    try:
        if not place.is_tiny:
            place.run([script, "compile", str(file), *words], 200)
        place.run([script, "measure", str(file), *words], 420)
    except subprocess.TimeoutExpired:
        if not file.exists():
            raise
    text = place.run([script, "compare", str(file), "--part", "unseen", *words[:2]], 60)
    for what, bounds in (("step time", ((15, 0.9), (25, 1.0))), ("memory", ((5, 1.0),))):
        line = next((line for line in text.splitlines() if line.startswith(what)), "")
        total = int(found[1]) if (found := re.search(r"of (\d+);", line)) else 0
        for percent, share in bounds:
            within = int(found[1]) if (found := re.search(rf"(\d+) within {percent}%", line)) else 0
            yield Result(f"plan, unseen specs, {what} within {percent} %", f"{share:.0%}",
                         f"{within} of {total}", within >= share * total if total else None)


def tests(place: Place) -> Iterator[Result]:
    """Agreement of the engines, resuming bit for bit, AUC."""
    words = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "gpu", str(BENCH.parent / "tests/unit/trainers")]
    text = place.run([*words, *(["--collect-only"] if place.is_tiny else [])], 300)
    last = text.strip().splitlines()[-1]
    yield Result("GPU tests: engines agree, runs resume bit for bit", "all pass", last,
                 None if place.is_tiny else "failed" not in last and "passed" in last)


def bench_rows(
    place: Place, words: list[str], settings: tuple[str, ...], batch: int, *, limit_s: float
) -> list[dict[str, Any]]:
    """The rows of `embark bench --json`: the peers, then Embark from memory, then from disk."""
    if place.is_tiny:
        settings = (*(s for s in settings if not s.startswith("data.num_train")), "data.num_train_samples=2000")
    seconds = "0.2" if place.is_tiny else "2"
    text = place.embark(["bench", *words, "--seconds", seconds, "--json"],
                        (*settings, f"train.batch_size={place.size(batch, 64)}"), limit_s)
    rows: list[dict[str, Any]] = json.loads(text[text.index("{") :])["rows"]
    return rows


MEASUREMENTS: dict[str, Callable[[Place], Iterator[Result]]] = {
    "start": start, "train": train,
    **{f"step-{preset}-{batch}": partial(step, preset, batch, goal) for preset, batch, goal in SHAPES},
    "options": options, "shuffle": shuffle, "tests": tests, "plan": plan,
}
"""The first needs an empty cache, the last takes longest."""


def main() -> None:
    arguments = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    arguments.add_argument("--out", type=Path, required=True)
    arguments.add_argument("--minutes", type=float, default=28, help="what is not begun by then is left out")
    arguments.add_argument("--only", default="", help="names, or what they begin with, of: " + ", ".join(MEASUREMENTS))
    arguments.add_argument("--tiny", action="store_true")
    asked = arguments.parse_args()
    lines = asked.out.read_text().splitlines() if asked.out.exists() else []
    results: dict[str, list[Result]] = {}
    for line in lines:
        found = json.loads(line)
        results.setdefault(found.pop("measurement"), []).append(Result(**found))
    folder = Path(tempfile.gettempdir()) / f"embark-goals-{os.getuid()}"  # the kernels of one call are the next one's
    folder.mkdir(exist_ok=True)
    place = Place(folder, asked.tiny, time.monotonic() + 60 * asked.minutes)
    for name in MEASUREMENTS:
        if name in results or not name.startswith(tuple(asked.only.split(","))) or time.monotonic() >= place.until_s:
            continue
        of_name = results.setdefault(name, [])
        try:
            for result in MEASUREMENTS[name](place):
                of_name.append(result)
                print(f"{result.what}: {result.measured} (goal {result.goal})", flush=True)
        except (RuntimeError, OSError, subprocess.TimeoutExpired, ValueError, LookupError) as error:
            print(f"{name}: {type(error).__name__}: {error}", flush=True)
            continue  # and not in the file: to be measured again
        with asked.out.open("a") as file:
            for result in of_name:
                fields = {key: getattr(result, key) for key in Result.__slots__}
                file.write(json.dumps({"measurement": name, **fields}, ensure_ascii=False) + "\n")
    words = {True: "reached", False: "not reached", None: ""}
    Console().table([{"": r.what, "goal": r.goal, "measured": r.measured, " ": words[r.is_reached]}
                     for of_name in results.values() for r in of_name])


if __name__ == "__main__":
    main()
