"""From an event to a served score that has learnt from it: `embark follow`, `embark publish --watch`, `embark serve`:
three processes on this machine, on a stream that drifts.

    python bench/freshness.py --seconds 120
    python bench/freshness.py --seconds 120 --gate
    python bench/freshness.py --cost --windows 12

Events arrive at a fixed rate. A version's checkpoint says how many of them it was trained on, and a client sees when
the server begins to answer with it, and that the scores of fixed rows change. The delay of an event is the time from
its arrival to the first answer by a version that was trained on it. Also: what share of the machine's CPU time the
publisher takes.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import psutil

SOURCE = (Path(__file__).parents[1] / "examples" / "drifting_world.py").read_text() + '''
import os
import time

RATE, BEGIN_S = float(os.environ["RATE"]), float(os.environ["BEGIN_S"])


class Source(Stream):
    """Event n arrives RATE events a second after BEGIN_S."""

    settings = {"samples_per_day": 200_000, "num_ids": 20_000, "rows": 20_000}

    def poll(self, offset, timeout_s):
        first = 0 if offset is None else offset + 1
        end_s = time.time() + timeout_s
        while (num := min(500, int((time.time() - BEGIN_S) * RATE) - first)) < 100 and time.time() < end_s:
            time.sleep(0.02)
        if num <= 0:
            return []
        return [(first + i, {**row, "time": BEGIN_S + (first + i) / RATE})
                for i, row in enumerate(self.rows(first, first + num))]
'''
SPEC = '''
name = "fresh"
model = {{ num_dense = 4, num_tables = 6, rows_per_table = 20000, embedding_dim = 16, bottom_mlp = [32] }}
stream = {{ source = "paced_rows:Source", time_column = "time" }}
train = {{ batch_size = 512 }}
store = {{ checkpoint_every = {every}, keep_checkpoints = 3 }}
publish = {{ to = "models", tables = "int8", every_minutes = {minutes}, gate = {gate}, data = "{data}" }}
place = {{ device = "{device}" }}
watch = {{ every = 20, tensorboard = false, phases_every_s = 0 }}
'''
PROBE = json.dumps({"rows": [{**{f"dense_{j}": 0.5 for j in range(4)}, **{f"cat_{j}": i for j in range(6)}}
                             for i in range(8)]}).encode()


def ask(port: int, path: str, body: bytes | None = None) -> dict:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", data=body, timeout=10) as response:
        return json.loads(response.read())


def wait_for(condition: Callable[[], Any], limit_s: float) -> Any:
    end_s = time.monotonic() + limit_s
    while time.monotonic() < end_s:
        try:
            if found := condition():
                return found
        except OSError:
            pass
        time.sleep(0.1)
    raise SystemExit("waited too long; see the logs")


def cpu_s(process: subprocess.Popen) -> float:
    times = psutil.Process(process.pid).cpu_times()
    return times.user + times.system


def delays(seen: list[tuple[float, int]], rate: float, begin_s: float, batch: int, from_event: int) -> np.ndarray:
    """Of each event that a served version has learnt from; `seen`: when a version of a step first answered."""
    found, learnt = [], from_event
    for at_s, step in seen:
        events = np.arange(learnt, step * batch)
        found.append(at_s - (begin_s + events / rate))
        learnt = max(learnt, step * batch)
    return np.concatenate(found)


def write_labelled(folder: Path, num: int = 50_000) -> None:
    """Rows of the stream as it is after a few minutes, for the gate."""
    code: dict[str, Any] = {}
    exec(SOURCE.replace('os.environ["RATE"]', "1").replace('os.environ["BEGIN_S"]', "0"), code)
    source = code["Source"](None)
    with (folder / "labelled.jsonl").open("w") as file:
        for start in range(0, num, 5_000):
            made = source.rows(400_000 + start, 405_000 + start)
            file.writelines(f"{json.dumps(row | {'time': 0})}\n" for row in made)


def trained(folder: Path) -> list[tuple[float, int]]:
    """When each step that was recorded was trained."""
    events = (json.loads(line) for line in (folder / "runs/fresh/events.jsonl").read_text().splitlines())
    return [(event["time_s"], event["step"]) for event in events if event["event"] == "step"]


def num_versions(folder: Path) -> int:
    """Written so far; old ones are deleted."""
    return max(int(one.name.rpartition("-")[2]) for one in folder.glob("models/version-*"))


def cost(folder: Path, publisher: subprocess.Popen, options: argparse.Namespace) -> dict[str, Any]:
    """Trained events a second with the publisher at work and with the publisher stopped, in windows by turns."""
    rates: dict[bool, list[float]] = {True: [], False: []}
    num_before = num_versions(folder)
    for number in range(2 * options.windows):
        is_on = number % 4 in (0, 3)  # ABBA: a drift of the machine's speed counts for both alike
        publisher.send_signal(signal.SIGCONT if is_on else signal.SIGSTOP)
        time.sleep(options.window_seconds)
        end_s = time.time()
        own = [(at, step) for at, step in trained(folder) if end_s - options.window_seconds + 0.5 < at <= end_s]
        rates[is_on].append(512 * (own[-1][1] - own[0][1]) / (own[-1][0] - own[0][0]))
    publisher.send_signal(signal.SIGCONT)
    pairs = [1 - a / b for a, b in zip(rates[True], rates[False], strict=True)]
    return {"events_per_s_publishing": round(float(np.mean(rates[True]))),
            "events_per_s_without": round(float(np.mean(rates[False]))), "windows": options.windows,
            "cost": round(1 - float(np.mean(rates[True]) / np.mean(rates[False])), 4),
            "standard_error": round(float(np.std(pairs, ddof=1) / np.sqrt(len(pairs))), 4),
            "versions": num_versions(folder) - num_before, "cores": os.cpu_count(),
            "load_average": os.getloadavg()[0]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rate", type=float, default=2_000)
    parser.add_argument("--seconds", type=float, default=120)
    parser.add_argument("--checkpoint-every", type=int, default=20)
    parser.add_argument("--every-minutes", type=float, default=0.05)
    parser.add_argument("--port", type=int, default=18_765)
    parser.add_argument("--device", default="cpu", help="of the trainer and the server: cpu or cuda")
    parser.add_argument("--gate", action="store_true")
    parser.add_argument("--cost", action="store_true")
    parser.add_argument("--windows", type=int, default=12, help="with --cost: with and without publishing, in turn")
    parser.add_argument("--window-seconds", type=float, default=8)
    options = parser.parse_args()
    if options.cost:
        options.rate = 1e9
    folder = Path(tempfile.mkdtemp(prefix="embark-freshness-"))
    (folder / "paced_rows.py").write_text(SOURCE)
    (folder / "fresh.toml").write_text(SPEC.format(
        every=options.checkpoint_every, minutes=options.every_minutes, gate=str(options.gate).lower(),
        device=options.device, data="labelled.jsonl" if options.gate else ""))
    if options.gate:
        write_labelled(folder)
    begin_s = time.time() + 5  # while processes start, events wait
    env = {**os.environ, "RATE": str(options.rate), "BEGIN_S": str(begin_s), "OMP_NUM_THREADS": "1"}
    processes: list[subprocess.Popen] = []

    def start(*words: str) -> subprocess.Popen:
        log = (folder / f"{words[0]}.log").open("w")
        processes.append(subprocess.Popen([sys.executable, "-m", "embark", *words], cwd=folder, env=env, stdout=log,
                                          stderr=log))
        return processes[-1]

    try:
        trainer = start("follow", "fresh.toml")
        wait_for(lambda: list(folder.glob("runs/fresh/checkpoints/*/commit.json")), 180)
        publisher = start("publish", "fresh", "--watch")
        wait_for(lambda: list(folder.glob("models/current.json")), 120)
        if options.cost:
            print(json.dumps(cost(folder, publisher, options)))
            return
        start("serve", "models", "--poll-s", "0.5", "--port", str(options.port), "--device", options.device)
        first = wait_for(lambda: ask(options.port, "/score", PROBE), 120)
        seen, scores = [], [first["scores"]]
        last, began_s, used_s = first["version"], time.time(), cpu_s(publisher)
        step_then = ask(options.port, "/v2/models/fresh")["parameters"]["step"]
        while time.time() - began_s < options.seconds:
            answer = ask(options.port, "/score", PROBE)
            if answer["version"] != last:
                last = answer["version"]
                seen.append((time.time(), ask(options.port, "/v2/models/fresh")["parameters"]["step"]))
                scores.append(answer["scores"])
            time.sleep(0.1)
        wall_s, share = time.time() - began_s, (cpu_s(publisher) - used_s) / (time.time() - began_s) / os.cpu_count()
        # The first versions catch up with the events that waited while the processes started.
        settled = len(seen) // 3
        before = seen[settled - 1][1] if settled else step_then
        found = delays(seen[settled:], options.rate, begin_s, 512, before * 512)
        versions = sorted(folder.glob("models/version-*"))
        num_deltas = sum((one / "delta.safetensors").exists() for one in versions)
        print(json.dumps({
            "events_per_s": options.rate, "seconds": round(wall_s), "versions_served": len(seen),
            "deltas": f"{num_deltas} of {len(versions)} kept", "events": len(found),
            **{f"delay_p{q}_s": round(float(np.percentile(found, q)), 2) for q in (50, 95, 99)},
            "scores_changed_in_every_version": all(a != b for a, b in pairwise(scores)),
            "publisher_share_of_cpu": round(share, 4), "cores": os.cpu_count(),
            "load_average": os.getloadavg()[0], "trainer_cpu_share": round(
                cpu_s(trainer) / (time.time() - psutil.Process(trainer.pid).create_time()) / os.cpu_count(), 3)}))
    finally:
        for one in reversed(processes):
            one.send_signal(signal.SIGTERM)
        for one in processes:
            try:
                one.wait(60)
            except subprocess.TimeoutExpired:
                one.kill()
        for log in folder.glob("*.log"):
            tail = log.read_text()[-300:]
            if "Traceback" in tail:
                print(log.name, tail, file=sys.stderr)
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
