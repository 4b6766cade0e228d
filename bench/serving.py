"""CPU time of a request to `embark serve` by its rows, columns and arithmetic, and the fit for `embark plan --serve`;
bench/serve_waiting.py says whether its waiting holds.

    python bench/serving.py

The server's own CPU time is read (user and system), so that neither the client nor a busy machine counts. It runs with
OMP_NUM_THREADS=1, as in the pods that `embark render` writes: more threads spin while they wait for work.
"""

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


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


def anonymous_mb(pid: int) -> float:
    status = Path(f"/proc/{pid}/status").read_text().splitlines()
    return int(next(line for line in status if line.startswith("RssAnon")).split()[1]) / 1e3


def body_of(spec: RunSpec, num_rows: int) -> str:
    draw = random.Random(1)
    return json.dumps({"rows": [
        {**{f"dense_{i}": round(draw.random(), 4) for i in range(spec.model.num_dense)},
         **{table.name: draw.randrange(table.rows) for table in spec.model.table_list()}} for _ in range(num_rows)]})


@contextmanager
def serving(artifact: str, num_workers: int = 1) -> Iterator[tuple[int, int]]:
    """A server: its port, and its process."""
    server = subprocess.Popen(
        [sys.executable, "-m", "embark", "serve", artifact, "--port", "0", "--workers", str(num_workers), "--json"],
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
        print(f"memory of the process besides the tables: {anonymous_mb(pid):,.0f} MB")
    return found


def main() -> None:
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
        terms: Any = np.array([work for *_, work, _ in measured])
        seconds = np.array([one[-1] for one in measured])
        # Relative errors: a request of one row counts as much as one of 128.
        fit = least_squares(terms / seconds[:, None])
        print("a request {:.3g} s, a column {:.3g} s, a cell {:.3g} s, a FLOP {:.3g} s".format(*fit))
        for title, num_rows, work, request_s in measured:
            print(f"| {title} | {num_rows} | {request_s * 1e3:.3f} | {float(np.dot(work, fit)) * 1e3:.3f} |")


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
