"""CPU time of a request to `embark serve` by its rows, columns and arithmetic, and the fit for `embark plan --serve`;
bench/serve_waiting.py says whether its waiting holds.

    python bench/serving.py                  # on two cores: taskset -c 2,3 python bench/serving.py
    python bench/serving.py --write          # to src/embark/plan/serving.toml, which the plan uses

The server's own CPU time is read (user and system), so that neither the client nor a busy machine counts. It runs with
OMP_NUM_THREADS=1, as in the pods that `embark render` writes: more threads spin while they wait for work. Its memory is
that of two processes at five times the rate that they can answer.
"""

import argparse
import asyncio
import datetime
import http.client
import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from serve import closed_loop, make_requests, overload, start

from embark import export_run, train
from embark.plan.serving import forward_flops, num_cells, num_columns
from embark.spec import RunSpec, load_spec

SHAPES = {
    "4 columns, small": ["model.num_tables=3", "model.num_dense=1", "model.bottom_mlp=[16]", "model.top_mlp=[64]"],
    "39 columns, small": ["model.bottom_mlp=[16]", "model.top_mlp=[64]"],
    "39 columns, large": ["model.bottom_mlp=[512,256]", "model.top_mlp=[1024,1024,512]"],
}
COMMON = ["model.rows_per_table=1000", "data.num_train_samples=4096", "data.num_eval_samples=1024",
          "train.batch_size=1024", "train.num_steps=1", "place.device=cpu", "watch.tensorboard=false"]
ROWS, NUM_REQUESTS, WARM = (1, 16, 128), 200, 20
TICKS = os.sysconf("SC_CLK_TCK")
FIGURES = Path(__file__).parents[1] / "src" / "embark" / "plan" / "serving.toml"
TOML = """# CPU time of a request to `embark serve`: of itself, of its columns, of its cells and of their arithmetic;
# and the memory of a replica's processes besides tables and id maps, at five times the rate that they can answer.
# Written by bench/serving.py --write; the measurements are in bench/RESULTS.md.
title = "{}: JSON over HTTP, int8 tables, one thread for arithmetic"
date = "{}"
request_s = {:.2e}
column_s = {:.2e}
cell_s = {:.2e}
flop_s = {:.2e}
process_bytes = {:.2e}
"""


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


def processor() -> str:
    lines = subprocess.run(["lscpu"], capture_output=True, text=True, check=True).stdout.splitlines()
    return next(line.partition(":")[2].strip() for line in lines if line.startswith("Model name"))


def body_of(spec: RunSpec, num_rows: int) -> str:
    draw = random.Random(1)
    return json.dumps({"rows": [
        {**{f"dense_{i}": round(draw.random(), 4) for i in range(spec.model.num_dense)},
         **{table.name: draw.randrange(table.rows) for table in spec.model.table_list()}} for _ in range(num_rows)]})


@contextmanager
def serving(artifact: str, num_workers: int = 1) -> Iterator[tuple[int, int]]:
    """A server: its port, and its process."""
    server = subprocess.Popen(
        [sys.executable, "-m", "embark", "serve", artifact, "--device", "cpu", "--port", "0", "--workers",
         str(num_workers), "--json"],
        stdout=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert server.stdout is not None
    try:
        url = ""
        while '"url"' not in url:
            url = server.stdout.readline()
        yield int(url.rpartition(":")[2].strip(' ",\n')), server.pid
    finally:
        server.terminate()
        server.wait(60)


def send(client: http.client.HTTPConnection, body: str) -> None:
    client.request("POST", "/score", body)
    answer = client.getresponse()
    assert answer.status == 200, answer.read()
    answer.read()


def measure(spec: RunSpec, artifact: str) -> list[tuple[int, float]]:
    """Of each number of rows, the server's CPU time of a request."""
    found = []
    with serving(artifact) as (port, pid):
        client = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        for num_rows in ROWS:
            body = body_of(spec, num_rows)
            for number in range(WARM + NUM_REQUESTS):
                if number == WARM:
                    before = cpu_s(pid)
                send(client, body)
            found.append((num_rows, (cpu_s(pid) - before) / NUM_REQUESTS))
    return found


def most_memory_mb(artifact: str) -> float:
    """Of two processes, beside which small tables are nothing."""
    requests, _, model = make_requests(artifact, 128)
    server = start("two processes", [sys.executable, "-m", "embark", "serve", artifact, "--device", "cpu", "--workers",
                                     "2", "--port", "PORT"], f"/v2/models/{model}/infer", requests)
    try:
        rate = float(closed_loop(server, 2.0, 128, 4)[0])
        return asyncio.run(overload(server, 5 * rate, 2.0, 128))
    finally:
        server.stop()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true")
    args = parser.parse_args()
    measured: list[tuple[str, int, list[float], float]] = []
    with TemporaryDirectory() as folder:
        for title, sets in SHAPES.items():
            name = title.replace(" ", "-").replace(",", "")
            spec = load_spec("quickstart", [*COMMON, *sets, f"name={name}", f"store.root={folder}"])
            train(spec)
            export_run(f"{folder}/{name}", tables="int8")
            for num_rows, request_s in measure(spec, f"{folder}/{name}/export"):
                work = [1.0, num_columns(spec), num_rows * num_cells(spec), num_rows * forward_flops(spec)]
                measured.append((title, num_rows, work, request_s))
        memory_mb = most_memory_mb(f"{folder}/{name}/export")
    terms: Any = np.array([work for *_, work, _ in measured])
    seconds = np.array([one[-1] for one in measured])
    # Relative errors: a request of one row counts as much as one of 128.
    fit = least_squares(terms / seconds[:, None])
    for title, num_rows, work, request_s in measured:
        print(f"| {title} | {num_rows} | {request_s * 1e3:.3f} | {float(np.dot(work, fit)) * 1e3:.3f} |")
    text = TOML.format(processor(), datetime.date.today(), *fit, 1e6 * memory_mb)
    print(text)
    if args.write:
        FIGURES.write_text(text)


def least_squares(terms: Any) -> Any:
    """What makes each sum 1; a term that would be negative is left out."""
    found, used = np.zeros(terms.shape[1]), list(range(terms.shape[1]))
    while True:
        parts = np.linalg.lstsq(terms[:, used], np.ones(len(terms)), rcond=None)[0]
        if parts.min() >= 0:
            found[used] = parts
            return found
        used.pop(int(parts.argmin()))


if __name__ == "__main__":
    main()
