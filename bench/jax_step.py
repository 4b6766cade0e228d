"""The step in JAX beside stock TorchRec and the captured engine: one device, one run, the same spec and batches.

    python bench/jax_step.py [SPEC] [--seconds 8] [--rounds 3] [--set key=value …] [--json FILE]

Each contender has a process of its own, for torch and JAX would share the device's memory badly; they run one after the
other, in rounds, and the median of the rounds counts. All of them train from batches that are in host memory before the
clock starts, and copy each batch to the device. Stock TorchRec is run as `embark bench` runs it, at its best settings;
JAX's first step, which compiles, is told apart. On a GPU JAX needs its CUDA build (`jax[cuda13]`) beside torch.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

CONTENDERS = ("stock fp32", "stock bf16", "embark", "jax")
NUM_BATCHES = 16
WARM_UP_STEPS = 20
_JOINED = ExitStack()
"""Held until the process ends: a group of ranks that nobody holds is left again."""


def main() -> None:
    asked = _arguments()
    if asked.contender:
        print(json.dumps(measured(asked.contender, asked.spec, asked.set, asked.seconds)))
        return
    rounds: dict[str, list[dict[str, Any]]] = {name: [] for name in CONTENDERS}
    for number in range(asked.rounds):
        for name in CONTENDERS:
            found = _in_a_process(name, asked)
            if found is None:
                continue
            rounds[name].append(found)
            print(f"round {number + 1}: {found['name']}: {found['step_ms']:.3f} ms", file=sys.stderr)
    rows = [_row(found) for found in rounds.values() if found]
    jax_ms = next(row["step_ms"] for row in rows if row["name"].startswith("JAX"))
    for row in rows:
        row["times_jax"] = row["step_ms"] / jax_ms
        print(f"{row['name']:44} {row['step_ms']:9.3f} ms ({row['fastest_ms']:.3f} to {row['slowest_ms']:.3f})  "
              f"{row['samples_per_s'] / 1e6:8.3f} M samples/s  {row['times_jax']:6.2f} of JAX's time  "
              f"first step {row['first_step_s']:.1f} s")
    if asked.json:
        asked.json.write_text(json.dumps(rows, indent=1) + "\n")


def measured(contender: str, spec_name: str, sets: list[str], seconds: float) -> dict[str, Any]:
    """In this process: seconds of a step, and of the first."""
    from embark.spec import load_spec

    spec = load_spec(spec_name, sets)
    run, wait, name, device = made_jax(spec) if contender == "jax" else _torch(spec, contender)
    began = time.perf_counter()
    run(1)
    wait()
    first_s = time.perf_counter() - began
    run(WARM_UP_STEPS)
    wait()
    began = time.perf_counter()
    run(3)
    wait()
    num_steps = max(3, int(seconds / 5 / ((time.perf_counter() - began) / 3)))
    times = []
    for _ in range(5):
        began = time.perf_counter()
        run(num_steps)
        wait()
        times.append((time.perf_counter() - began) / num_steps)
    return {"name": name, "device": device, "step_ms": statistics.median(times) * 1e3,
            "first_step_s": first_s, "batch_size": spec.train.batch_size}


Made = tuple[Callable[[int], None], Callable[[], None], str, str]
"""Train so many steps; wait for the device; the contender's name; the device's."""


def made_jax(spec: Any) -> Made:
    """The trainer in JAX, ready to step."""
    from itertools import count

    import jax

    from embark.data import open_source
    from embark.data.loader import Prefetcher
    from embark.model.jax_layout import NUM_AHEAD
    from embark.spec import PlaceSpec
    from embark.trainers.bench import ENDLESS, first_batches
    from embark.trainers.jax.prefetch import to_devices
    from embark.trainers.jax.state import initial_state
    from embark.trainers.jax.trainer import JaxTrainer
    from embark.trainers.jax.world import join

    world = _JOINED.enter_context(join(PlaceSpec(device="jax")))
    if world.num_devices > 1:
        raise SystemExit(f"JAX sees {world.num_devices} devices, and this compares one: set CUDA_VISIBLE_DEVICES=0")
    source = open_source(spec)
    trainer = JaxTrainer(spec, world, ENDLESS, source)
    trainer.state = initial_state(spec, trainer.table_layout, world)
    batches = first_batches(spec, source)
    ahead = Prefetcher(lambda number: to_devices(batches[number % len(batches)], spec, trainer.table_layout, world),
                       ENDLESS, depth=NUM_AHEAD)
    ahead.start()
    _JOINED.callback(ahead.close)
    placed, numbers = ahead.take(), count()

    def run(num_steps: int) -> None:
        for _ in range(num_steps):
            trainer.step(placed, next(numbers))

    def wait() -> None:
        jax.block_until_ready(trainer.state)

    return run, wait, f"JAX {jax.__version__}, {trainer.precision}, from memory", world.device_name


def _torch(spec: Any, contender: str) -> Made:
    from embark.data import open_source
    from embark.trainers.torch.bench.contenders import Embark, Stock
    from embark.trainers.torch.trainer import set_matmul_precision
    from embark.trainers.torch.world import join

    world = _JOINED.enter_context(join(spec.place))
    source = open_source(spec)
    size = spec.train.batch_size
    num_batches = min(NUM_BATCHES, source.num_train_samples // size)
    set_matmul_precision("tf32")  # stock's best
    if contender == "embark":
        made: Any = Embark(spec, world, source, num_batches)
    else:
        batches = [source.train_rows(0, i * size, (i + 1) * size) for i in range(num_batches)]
        made = Stock(spec, world, batches, is_bf16=contender == "stock bf16")
    return made.run, made.wait, made.name, world.device_name


def _in_a_process(contender: str, asked: argparse.Namespace) -> dict[str, Any] | None:
    words = [sys.executable, __file__, asked.spec, "--seconds", str(asked.seconds), "--contender", contender]
    words += [word for setting in asked.set for word in ("--set", setting)]
    # JAX would else take three quarters of the device's memory at once; it is alone there, but so it is seen.
    env = {**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    done = subprocess.run(words, capture_output=True, text=True, check=False, env=env)
    if done.returncode:
        print(f"{contender}: {done.stderr.strip().splitlines()[-1] if done.stderr.strip() else 'failed'}",
              file=sys.stderr)
        return None
    return dict(json.loads(done.stdout.splitlines()[-1]))


def _row(found: list[dict[str, Any]]) -> dict[str, Any]:
    times = [one["step_ms"] for one in found]
    step_ms = statistics.median(times)
    return {"name": found[0]["name"], "device": found[0]["device"], "step_ms": step_ms, "fastest_ms": min(times),
            "slowest_ms": max(times), "first_step_s": statistics.median(one["first_step_s"] for one in found),
            "samples_per_s": found[0]["batch_size"] / step_ms * 1e3, "num_rounds": len(found)}


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("spec", nargs="?", default="quickstart")
    parser.add_argument("--set", action="append", default=[], metavar="key=value")
    parser.add_argument("--seconds", type=float, default=8.0, help="for each contender in each round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--contender", choices=CONTENDERS, help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
