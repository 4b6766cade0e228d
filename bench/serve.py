"""`embark serve` under load, beside the same network in plain PyTorch behind FastAPI; the client is on the same cores.

    embark train quickstart --set train.precision=fp32 && embark export quickstart --tables int8
    pip install fastapi
    python bench/serve.py runs/quickstart/export

Requests of `--candidates` rows as raw tensors, of two kinds: every column of every candidate, and one user whose dense
and half of whose sparse columns are sent once. In turn: the servers in short rounds with a few clients that wait for
their answer, the peer with one process and with one for each core, of which medians are printed; five times the rate,
for goodput and memory; 10,000 idle connections. bench/serve_loadgen.py drives it by MLPerf's LoadGen.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import resource
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import psutil
import uvloop
from numpy.typing import NDArray

from embark.export.artifact import open_artifact

NUM_REQUESTS = 64  # Different ones, sent in turn.
CLIENTS = (1, 2, 4)
NUM_IDLE = 10_000
NUM_WINDOWS = 5  # Of an overload.


@dataclass
class Server:
    """A process that answers at a port."""

    name: str
    path: str
    port: int
    process: psutil.Popen
    requests: list[tuple[bytes, dict[str, str]]]
    is_group: bool = False  # Each of its processes is to be ended.

    def processes(self) -> list[psutil.Process]:
        return [self.process, *self.process.children(recursive=True)]

    def memory_mb(self) -> float:
        """Of all its processes; a page that several share counts once."""
        return sum(one.memory_full_info().pss for one in self.processes()) / 1e6

    def cpu_ms(self) -> float:
        """Of all its processes."""
        used = [one.cpu_times() for one in self.processes()]
        return 1e3 * sum(one.user + one.system for one in used)

    def stop(self) -> None:
        processes = self.processes()
        for one in processes if self.is_group else processes[:1]:
            one.terminate()
        psutil.wait_procs(processes, 60)

    @cached_property
    def messages(self) -> list[bytes]:
        """Whole requests, as they are sent."""
        found = []
        for body, headers in self.requests:
            lines = {"Host": "x", "Content-Length": str(len(body)), **headers}
            found.append(f"POST {self.path} HTTP/1.1\r\n".encode() + b"".join(
                f"{key}: {value}\r\n".encode() for key, value in lines.items()) + b"\r\n" + body)
        return found


class Connection:
    """A client that takes as little of the cores as it can, since the server has the same ones."""

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), timeout=60)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.close = self._socket.close

    def call(self, message: bytes) -> tuple[int, bytes]:
        """The status of the answer, and all of it."""
        self._socket.sendall(message)
        answer = self._receive()
        while (end := answer.find(b"\r\n\r\n")) < 0:
            answer += self._receive()
        length = end + 4 + int(answer[:end].lower().partition(b"content-length:")[2].partition(b"\r")[0])
        while len(answer) < length:
            answer += self._receive()
        return int(answer[9:12]), answer

    def _receive(self) -> bytes:
        if not (piece := self._socket.recv(1 << 16)):
            raise ConnectionError("the server closed the connection")
        return piece


def peer_app(artifact: str, num_threads: int, *, is_bf16: bool) -> Any:
    """Plain PyTorch behind FastAPI, at its best: float32 tables in one, numpy bodies, no checks, the bottom network of
    a user once, and the fastest product of batches that torch has on this machine; with `is_bf16`, layers by AMX."""
    import torch
    from fastapi import FastAPI, Request, Response

    from embark.trainers.torch.scoring.cpu_layers import speed_up
    from embark.trainers.torch.scoring.cpu_model import ExportedModel, load_network

    opened = open_artifact(artifact)
    model, layout = ExportedModel(opened), opened.info.rows.layout
    table = torch.cat([torch.cat([look_up(ids, None) for ids in torch.arange(feature.rows).split(8_192)])
                       for feature, (_, look_up) in zip(layout.features, model._lookups, strict=True)])
    first_rows = torch.tensor(np.cumsum([0, *(feature.rows for feature in layout.features[:-1])]))
    network, app = load_network(opened, ""), FastAPI()
    speed_up(network, is_int8=False)  # the layout of weights in which torch is fastest on this machine
    bottom, top, num_vectors, dim = network.bottom.network, network.top, network.num_vectors, network.dim
    pairs = network.interaction.dots.pair_cells
    num_dense, num_tables, num_shared = len(layout.dense), len(layout.features), len(layout.features) // 2
    torch.set_num_threads(num_threads)
    if is_bf16:
        torch.backends.mkldnn.matmul.fp32_precision = "bf16"

    def forward(dense: Any, ids: Any) -> Any:
        passed_on = bottom(dense).expand(len(ids), -1)
        pooled = table.index_select(0, (ids + first_rows).view(-1)).view(len(ids), num_vectors - 1, dim)
        vectors = torch.cat([passed_on[:, None], pooled], dim=1)
        dots = torch.bmm(vectors, vectors.transpose(1, 2).contiguous()).flatten(1).index_select(1, pairs)
        return top(torch.cat([passed_on, dots], dim=1)).squeeze(1).sigmoid()

    @torch.inference_mode()
    def answer(body: bytes, shared: int) -> Any:
        if shared:
            dense = np.frombuffer(body, "<f4", num_dense).reshape(1, -1)
            user = np.frombuffer(body, "<i8", shared, 4 * num_dense)
            own = np.frombuffer(body, "<i8", offset=4 * num_dense + 8 * shared).reshape(num_tables - shared, -1)
            ids = np.vstack([np.repeat(user[:, None], own.shape[1], axis=1), own])
        else:
            num_rows = len(body) // (4 * num_dense + 8 * num_tables)
            dense = np.frombuffer(body, "<f4", num_rows * num_dense).reshape(num_rows, num_dense)
            ids = np.frombuffer(body, "<i8", offset=dense.nbytes).reshape(-1, num_rows)
        return forward(torch.from_numpy(dense.copy()), torch.from_numpy(ids.T.copy())).numpy().tobytes()

    async def score(request: Request) -> Response:
        body = await request.body()
        return Response(answer(body, num_shared if request.url.query else 0), media_type="application/octet-stream")

    app.add_route("/score", score, ["POST"])
    return app


def serve_peer(args: argparse.Namespace) -> None:
    """The peer, in processes that accept from one socket."""
    import uvicorn

    with socket.create_server(("127.0.0.1", args.peer_port)) as listener:
        for _ in range(args.peer_processes - 1):
            if not os.fork():
                break
        app = peer_app(args.artifact, args.peer_threads, is_bf16=args.peer_bf16)
        uvicorn.Server(uvicorn.Config(app, log_level="warning")).run([listener])


def make_requests(artifact: str, num_rows: int, is_shared: bool = False) -> tuple[list[Any], list[Any], str]:
    """The same rows for both servers, and the model's name. `is_shared`: the dense and half of the sparse columns are
    those of one user."""
    opened, rng = open_artifact(artifact), np.random.default_rng(0)
    layout = opened.info.rows.layout
    ours, peers = [], []
    for _ in range(NUM_REQUESTS):
        dense = rng.normal(size=(1 if is_shared else num_rows, len(layout.dense))).astype("<f4")
        ids = [rng.integers(feature.rows, size=1 if is_shared and number < len(layout.features) // 2 else num_rows,
                            dtype=np.int64) for number, feature in enumerate(layout.features)]
        columns = [*zip(layout.dense, ["FP32"] * len(layout.dense), dense.T, strict=True),
                   *zip((feature.name for feature in layout.features), ["INT64"] * len(ids), ids, strict=True)]
        header = json.dumps({"parameters": {"binary_data_output": True}, "inputs": [
            {"name": name, "datatype": datatype, "shape": [len(values)],
             "parameters": {"binary_data_size": values.nbytes}} for name, datatype, values in columns]}).encode()
        ours.append((header + b"".join(values.tobytes() for _, _, values in columns),
                     {"Inference-Header-Content-Length": str(len(header))}))
        peers.append((dense.tobytes() + b"".join(own.tobytes() for own in ids), {}))
    return ours, peers, opened.info.run.rstrip("/").rpartition("/")[2]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def start(name: str, command: list[str], path: str, requests: list[Any]) -> Server:
    port = free_port()
    command = [word.replace("PORT", str(port)) for word in command]
    process = psutil.Popen(command, stdout=subprocess.DEVNULL)
    server = Server(name, path, port, process, requests, is_group="--peer-port" in command)
    for _ in range(3_000):
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            return server
        except OSError:
            time.sleep(0.1)
    server.stop()
    raise SystemExit(f"{name} does not start")


async def send(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, request: bytes) -> int:
    """The status of the answer."""
    writer.write(request)
    head = await reader.readuntil(b"\r\n\r\n")
    lines = head.lower().split(b"\r\n")
    await reader.readexactly(next(int(line.split(b":")[1]) for line in lines if line.startswith(b"content-length:")))
    return int(head.split(b" ", 2)[1])


def closed_loop(server: Server, seconds: float, num_rows: int, num_clients: int) -> NDArray[np.float64]:
    """Candidates a second, p50, p99 and CPU time of a request, with clients that each wait for their answer."""
    latencies: list[float] = []
    statuses: Counter[int] = Counter()
    messages, before = server.messages, server.cpu_ms()
    began = time.perf_counter()

    def client(number: int) -> None:
        with closing(Connection(server.port)) as connection:
            while (started := time.perf_counter()) < began + seconds:
                statuses[connection.call(messages[number % len(messages)])[0]] += 1
                latencies.append(time.perf_counter() - started)
                number += num_clients

    threads = [threading.Thread(target=client, args=(number,)) for number in range(num_clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if statuses.keys() != {200}:
        raise SystemExit(f"{server.name}: statuses {dict(statuses)}")
    rate = len(latencies) * num_rows / (time.perf_counter() - began)
    p50, p99 = np.percentile(latencies, [50, 99]) * 1e3
    return np.array([rate, p50, p99, (server.cpu_ms() - before) / len(latencies)])


def compare(servers: Sequence[Server], args: argparse.Namespace, num_rounds: int) -> float:
    """Medians of rounds in turn; the highest rate of the servers of Embark."""
    best = 0.0
    for num_clients in CLIENTS:
        rounds = [[closed_loop(server, args.seconds, args.candidates, num_clients) for server in servers]
                  for _ in range(num_rounds)]
        for server, (rate, p50, p99, cpu_ms) in zip(servers, np.median(rounds, axis=0), strict=True):
            best = max(best, rate if server.name.startswith("Embark") else 0)
            print(f"{server.name}: {num_clients} clients, {rate:,.0f} candidates/s, p50 {p50:.2f} ms, p99 {p99:.2f} "
                  f"ms, {cpu_ms:.2f} ms of the server's CPU a request", flush=True)
    return best


async def overload(server: Server, rate: float, seconds: float, num_rows: int) -> float:
    """Requests at a rate that does not wait for answers: goodput by window of `seconds`, and the server's memory, of
    which the most is returned, in MB."""
    statuses: Counter[int] = Counter()
    goodput = [0] * NUM_WINDOWS
    free: list[tuple[Any, Any]] = []
    before, most, looked_s = server.memory_mb(), 0.0, 0.0
    messages, started = server.messages, time.perf_counter()

    async def one(number: int) -> None:
        try:
            reader, writer = free.pop() if free else await asyncio.open_connection("127.0.0.1", server.port)
            status = await send(reader, writer, messages[number % len(messages)])
            window = int((time.perf_counter() - started) / seconds)
            statuses[status if window < NUM_WINDOWS else 0] += 1
            if status == 200 and window < NUM_WINDOWS:
                goodput[window] += num_rows
            free.append((reader, writer))
        except (OSError, asyncio.IncompleteReadError):
            statuses[-1] += 1

    tasks = set()
    number = 0
    while (now := time.perf_counter() - started) < NUM_WINDOWS * seconds:
        while number < now * rate / num_rows:
            task = asyncio.create_task(one(number))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
            number += 1
        if now > looked_s + 0.2:  # it takes time
            most, looked_s = max(most, server.memory_mb()), now
        await asyncio.sleep(0.01)
    await asyncio.gather(*tasks)
    sent = number * num_rows / (NUM_WINDOWS * seconds)
    print(f"{server.name}: sent {sent:,.0f} candidates/s, goodput in windows of {seconds:g} s "
          + ", ".join(f"{num / seconds:,.0f}" for num in goodput)
          + f"; 429: {statuses[429]}, 503: {statuses[503]}, answered later: {statuses[0]}, closed: {statuses[-1]}; "
            f"memory {before:.0f} to {most:.0f} MB")
    return most


def idle_connections(server: Server) -> None:
    """Held open by clients that send nothing."""
    limit = min(NUM_IDLE, resource.getrlimit(resource.RLIMIT_NOFILE)[1] - 500)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit + 500, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    before, opened = server.memory_mb(), []
    for _ in range(limit):
        opened.append(socket.create_connection(("127.0.0.1", server.port), timeout=60))
    after = server.memory_mb()
    for one in opened:
        one.close()
    with urllib.request.urlopen(f"http://127.0.0.1:{server.port}/v2/health/ready", timeout=60) as answer:
        print(f"{server.name}: {limit:,} idle connections, memory {before:.0f} to {after:.0f} MB, then status "
              f"{answer.status}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("artifact")
    parser.add_argument("--candidates", type=int, default=128)
    parser.add_argument("--seconds", type=float, default=5)
    parser.add_argument("--only", choices=("rates", "overload", "idle"), nargs="*", default=None)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--peer-port", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--peer-processes", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--peer-threads", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--workers", type=int, nargs="*", default=[1, None], help="of Embark; default: 1 and its own")
    parser.add_argument("--peers", type=int, nargs="*", default=[1, len(os.sched_getaffinity(0))], help="processes")
    parser.add_argument("--peer-bf16", action="store_true", help="layers of the peer in bf16, which AMX multiplies")
    parser.add_argument("--client-cpus", default="", help="10,11: the client's own; the servers keep those of taskset")
    args = parser.parse_args()
    if args.peer_port:
        serve_peer(args)
        return
    own, shared = (make_requests(args.artifact, args.candidates, is_shared) for is_shared in (False, True))
    model = own[2]
    script = [sys.executable, __file__, args.artifact, *(["--peer-bf16"] if args.peer_bf16 else [])]
    ours = [start(f"Embark, --workers {num or 'by default'}", [
        sys.executable, "-m", "embark", "serve", args.artifact, "--device", "cpu", "--port", "PORT",
        *(["--workers", str(num)] if num else [])], f"/v2/models/{model}/infer", own[0]) for num in args.workers]
    cores = len(os.sched_getaffinity(0))
    peers = [start(f"PyTorch and FastAPI, {num} processes of {threads} threads", [
        *script, "--peer-port", "PORT", "--peer-processes", str(num), "--peer-threads", str(threads)], "/score", own[1])
        for num, threads in ((num, max(1, cores // num)) for num in args.peers)]
    embark = ours[-1]
    if args.client_cpus:
        os.sched_setaffinity(0, set(map(int, args.client_cpus.split(","))))
    try:
        parts = args.only or ("rates", "overload", "idle")
        num_rounds = args.rounds if "rates" in parts else 1
        for server in (*ours, *peers):
            print(f"{server.name}: {server.memory_mb():.0f} MB after the start", flush=True)
        print("half of the columns of one user", flush=True)
        compare([*(replace(one, requests=shared[0]) for one in ours),
                 *(replace(peer, requests=shared[1], path="/score?shared") for peer in peers)], args, num_rounds)
        print("all columns of each candidate", flush=True)
        rate = compare([*ours, *peers], args, num_rounds)
        if "overload" in parts:
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                runner.run(overload(embark, 5 * rate, args.seconds, args.candidates))
        if "idle" in parts:
            idle_connections(embark)
    finally:
        for server in (*ours, *peers):
            server.stop()


if __name__ == "__main__":
    main()
