"""Where a step's time goes in JAX: the device's operations by kind, and what the host does meanwhile.

    python bench/jax_profile.py [SPEC] [--steps 30] [--set key=value …]

Taken by JAX's own profiler over steps that train from batches in host memory, as `bench/jax_step.py` runs them. On a
CPU the profiler tells XLA's thunks, on a GPU the kernels of every stream.
"""

from __future__ import annotations

import argparse
import gzip
import json
import re
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

from jax_step import WARM_UP_STEPS, made_jax

KINDS = (
    ("sorting ids", r"sort|radix|DeviceSegmented"),
    ("matrices", r"gemm|cutlass|cublas|nvjet|dot|matmul|sm90_|xmma"),
    ("copies from and to the host", r"MemcpyH2D|MemcpyD2H|HtoD|DtoH"),
    ("copies on the device", r"MemcpyD2D|DtoD|^copy|memset"),
    ("scatter", r"scatter"),
    ("gather", r"gather|dynamic_slice"),
    ("sums", r"reduce"),
    ("elementwise and other fusions", r"fusion|wrapped|transpose|concat|broadcast|select|convert|add|multiply"),
)


def main() -> None:
    asked = _arguments()
    from embark.spec import load_spec

    spec = load_spec(asked.spec, asked.set)
    run, wait, name, device = made_jax(spec)
    run(WARM_UP_STEPS)
    wait()
    import jax

    began = time.perf_counter()
    run(asked.steps)
    given_s = time.perf_counter() - began
    wait()
    step_ms = (time.perf_counter() - began) / asked.steps * 1e3
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            run(asked.steps)
            wait()
        events = _events(Path(folder))
    print(f"{name} on {device}, batch {spec.train.batch_size:,}: {step_ms:.3f} ms a step, not profiled; the host had "
          f"given a step after {given_s / asked.steps * 1e3:.3f} ms")
    _tell(events, asked.steps)


def _events(folder: Path) -> list[dict[str, Any]]:
    """What ran on the device: every event of its tracks."""
    path = next(folder.rglob("*.trace.json.gz"))
    told = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    processes = {e["pid"]: e["args"]["name"] for e in told if e.get("name") == "process_name"}
    threads = {(e["pid"], e["tid"]): e["args"]["name"] for e in told if e.get("name") == "thread_name"}
    devices = {pid for pid, name in processes.items() if "/device:" in name}
    found = []
    for event in told:
        if event.get("ph") != "X":
            continue
        track = threads.get((event["pid"], event["tid"]), "")
        is_device = event["pid"] in devices and track.startswith("Stream")
        is_thunk = not devices and "hlo_op" in event.get("args", {})
        if is_device or is_thunk:
            found.append(event)
    if not found:
        sys.exit(f"the profile has no operations of a device; its tracks: {sorted(set(threads.values()))[:20]}")
    return found


def _tell(events: list[dict[str, Any]], num_steps: int) -> None:
    by_kind: dict[str, float] = defaultdict(float)
    by_name: dict[str, tuple[float, int]] = {}
    for event in events:
        name = str(event.get("args", {}).get("hlo_op") or "") + " " + str(event["name"])
        kind = next((kind for kind, form in KINDS if re.search(form, name, re.IGNORECASE)), "other")
        by_kind[kind] += event["dur"]
        total, count = by_name.get(name, (0.0, 0))
        by_name[name] = total + event["dur"], count + 1
    total_us = sum(by_kind.values())
    print(f"\n{total_us / num_steps / 1e3:9.3f} ms of operations a step, {len(events) / num_steps:.0f} of them")
    for kind, spent in sorted(by_kind.items(), key=lambda pair: -pair[1]):
        print(f"{spent / num_steps / 1e3:9.3f} ms  {spent / total_us:5.1%}  {kind}")
    print("\nthe longest")
    for name, (spent, count) in sorted(by_name.items(), key=lambda pair: -pair[1][0])[:25]:
        print(f"{spent / num_steps / 1e3:9.3f} ms  {count / num_steps:5.1f} a step  {name[:150]}")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("spec", nargs="?", default="quickstart")
    parser.add_argument("--set", action="append", default=[], metavar="key=value")
    parser.add_argument("--steps", type=int, default=30)
    return parser.parse_args()


if __name__ == "__main__":
    main()
