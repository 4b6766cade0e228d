"""`embark serve` on a GPU, with a model of Criteo-1TB's shape: scores against the CPU's, the rate by batch size,
latency of one request in the server's clock and over loopback, the rate over HTTP and gRPC. One command, no training.

    python bench/serve_gpu.py                          on a GPU, about 3 minutes
    python bench/serve_gpu.py --device cpu --tiny      the same steps here, to try the script

Weights are drawn. Tables have `--scale` (1/8) of the preset's rows: 25 million, 3.5 GB in int8, which is 60 times an
H200's L2 cache, so that lookups still go to its memory. Requests have uniform ids, so that hardly a row repeats.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import re
import subprocess
import sys
import tempfile
import threading
import time
import types
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from serve import Connection

from embark import __version__, load_spec
from embark.data.prepared import Feature, Layout, Rows
from embark.export.artifact import (
    ID_MAPS,
    INFO,
    WEIGHTS,
    Artifact,
    ArtifactInfo,
    RowFormat,
    open_artifact,
    open_versions,
    set_current,
)
from embark.export.quantize import TableDtype, quantize_rows, row_format
from embark.export.safetensors_file import TensorSource, file_of, in_memory
from embark.features.encoding import PLAIN_FEATURES
from embark.features.schema import Schema, SparseColumn
from embark.spec.data import PrepareSpec
from embark.spec.model import ModelSpec
from embark.spec.serve import Precision, ScoringDevice
from embark.store import ChecksumWriter, checkpoint_name
from embark.store.checkpoint_arrays import table_weight
from embark.trainers.torch.networks import dense_network
from embark.trainers.torch.scoring.cpu_model import ExportedModel
from embark.trainers.torch.scoring.gpu_model import MAX_BATCH_ROWS
from embark.trainers.torch.scoring.open_model import ScoringModel, open_model

NAME = "criteo"
NUM_REQUESTS = 32  # Different ones, sent in turn.
TOLERANCE = {"fp32": 1e-4, "tf32": 1e-2, "bf16": 5e-2}
Send = Callable[[int], int]  # Sends a request of this number; how many bytes of scores came back.


def make_artifact(folder: Path, model: ModelSpec, tables: TableDtype) -> None:
    """A version with drawn weights; the rows of a table repeat after 65,536."""
    rng = np.random.default_rng(0)
    drawn = rng.normal(0, 0.3, (65_536, model.embedding_dim)).astype(np.float32)
    block = quantize_rows(drawn, tables)
    sources = [in_memory(f"dense.{name}", rng.normal(0, (2 / value.shape[-1]) ** 0.5 if value.dim() > 1 else 0.1,
                                                     tuple(value.shape)).astype(np.float32))
               for name, value in dense_network(model).state_dict().items()]
    for table in model.stored_tables():
        element, num = row_format(tables, table.dim)

        def pieces(num_rows: int = table.rows) -> Iterator[np.ndarray[Any, Any]]:
            for start in range(0, num_rows, len(block)):
                yield block[: num_rows - start]

        name = table_weight(table.name).removeprefix("model.")
        sources.append(TensorSource(name, element, (table.rows, num), pieces))
    names = tuple(f"dense_{i}" for i in range(model.num_dense))
    rows = RowFormat(
        columns=Schema("csv", "", names, tuple(SparseColumn(t.name, "integer") for t in model.table_list()), ()),
        prepare=PrepareSpec(missing=("",)), hashed_rows={t.name: t.rows for t in model.table_list()},
        layout=Layout(names, tuple(Feature(t.name, t.rows) for t in model.table_list())), plain_ids="refuse",
        features=PLAIN_FEATURES)
    info = ArtifactInfo(embark=__version__, run=f"runs/{NAME}", step=0, tables=tables, rows=rows,
                        model=model.model_copy(update={"tables": model.table_list()}))
    versions, version = open_versions(str(folder)), checkpoint_name(1, "version")
    store = ChecksumWriter(versions.store)
    store.write(f"{version}/{INFO}", info.model_dump_json().encode())
    for name, tensors in ((ID_MAPS, []), (WEIGHTS, sources)):
        size, data = file_of(tensors, {})
        store.write(f"{version}/{name}", data, size)
    versions.commit(1, {path.removeprefix(f"{version}/"): mark for path, mark in store.marks.items()}, {})
    set_current(versions, 1)


def draw_rows(artifact: Artifact, num_rows: int, seed: int = 0) -> Rows:
    rng, layout = np.random.default_rng(seed), artifact.info.rows.layout
    ids = tuple(rng.integers(feature.rows, size=num_rows).astype(feature.id_dtype) for feature in layout.features)
    return Rows(np.zeros(num_rows, np.uint8), rng.normal(size=(num_rows, len(layout.dense))).astype(np.float32), ids,
                (None,) * len(ids))


def percentiles(seconds: list[float]) -> str:
    p50, p99 = np.percentile(seconds, [50, 99]) * 1e3
    return f"p50 {p50:7.3f} ms, p99 {p99:7.3f} ms"


def check_numbers(artifact: Artifact, model: ScoringModel, precision: Precision, num_rows: int) -> None:
    rows = draw_rows(artifact, num_rows, seed=1)
    found, expected = model.score_encoded(rows), ExportedModel(artifact).score_encoded(rows)
    off = np.abs(found - expected)
    print(f"  {num_rows:,} scores against the CPU's: largest difference {off.max():.2e}, mean {off.mean():.2e}; scores "
          f"have a standard deviation of {expected.std():.3f}")
    if not off.max() <= TOLERANCE[precision]:
        raise SystemExit(f"{precision}: scores differ by more than {TOLERANCE[precision]}")


def measure_engine(artifact: Artifact, model: ScoringModel, sizes: list[int], seconds: float) -> None:
    """By batch size: the device's rate, with its copies in and out, batches queued without waiting; and calls that each
    wait for their scores, from rows with ids in numpy's arrays."""
    is_gpu = hasattr(model, "launch")
    print("  rows      device only        one call after the other")
    for size in sizes:
        rows, alone = draw_rows(artifact, size), "–"
        model.score_encoded(rows)
        if is_gpu and size <= MAX_BATCH_ROWS:
            alone = f"{size * device_calls(model, rows, seconds):12,.0f}/s"
        took: list[float] = []
        end = time.perf_counter() + seconds
        while (started := time.perf_counter()) < end or len(took) < 5:
            model.score_encoded(rows)
            took.append(time.perf_counter() - started)
        print(f"  {size:6,}  {alone:>14}   {size * len(took) / sum(took):12,.0f}/s, {percentiles(took)}")


def device_calls(model: Any, rows: Rows, seconds: float) -> float:
    """Batches a second."""
    slot, to = model._slots[0], np.empty(len(rows), np.float32)
    with torch.inference_mode():
        bucket = model.fill(slot, rows)
        num_calls, started = 0, time.perf_counter()
        while time.perf_counter() - started < seconds:
            for _ in range(50):
                model.launch(slot, bucket, to)
            num_calls += 50
            torch.cuda.synchronize()
        rate = num_calls / (time.perf_counter() - started)
        slot.finish()
    return rate


@dataclass(frozen=True)
class Request:
    """The same rows for both protocols."""

    http: bytes
    grpc: bytes


def has_grpc() -> bool:
    """Where it is not installed, HTTP alone is measured."""
    return importlib.util.find_spec("grpc") is not None


def make_requests(artifact: Artifact, num_rows: int) -> list[Request]:
    if has_grpc():
        from embark.serve.grpc_server import message_classes

        infer = message_classes()["ModelInferRequest"]
    found = []
    for number in range(NUM_REQUESTS):
        rows, layout = draw_rows(artifact, num_rows, seed=10 + number), artifact.info.rows.layout
        columns = [*((name, "FP32", np.ascontiguousarray(values)) for name, values in
                     zip(layout.dense, rows.dense.T, strict=True)),
                   *((feature.name, "INT64", ids.astype(np.int64)) for feature, ids in
                     zip(layout.features, rows.ids, strict=True))]
        header = json.dumps({"parameters": {"binary_data_output": True}, "inputs": [
            {"name": name, "datatype": datatype, "shape": [num_rows],
             "parameters": {"binary_data_size": values.nbytes}} for name, datatype, values in columns]}).encode()
        raw = [values.tobytes() for _, _, values in columns]
        body = header + b"".join(raw)
        head = (f"POST /v2/models/{NAME}/infer HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n"
                f"Inference-Header-Content-Length: {len(header)}\r\n\r\n")
        found.append(Request(head.encode() + body, b"" if not has_grpc() else infer(
            model_name=NAME, raw_input_contents=raw, inputs=[
                {"name": name, "datatype": datatype, "shape": [num_rows]} for name, datatype, _ in columns],
        ).SerializeToString()))
    return found


def http_client(address: str, requests: list[Request]) -> Send:
    connection = Connection(int(address.rpartition(":")[2]))

    def send(number: int) -> int:
        status, answer = connection.call(requests[number % len(requests)].http)
        if status != 200:
            raise SystemExit(f"HTTP: {answer[:300]!r}")
        head, _, body = answer.partition(b"\r\n\r\n")
        return len(body) - int(re.search(rb"inference-header-content-length: *(\d+)", head.lower())[1])  # type: ignore[index]

    return send


def grpc_client(address: str, requests: list[Request]) -> Send:
    import grpc

    from embark.serve.grpc_server import SERVICE, message_classes

    read = message_classes()["ModelInferResponse"].FromString
    call = grpc.insecure_channel(address).unary_unary(f"/{SERVICE}/ModelInfer")

    def send(number: int) -> int:
        return len(read(call(requests[number % len(requests)].grpc)).raw_output_contents[0])

    return send


def drive(connect: Callable[[], Send], num_clients: int, num_rows: int, seconds: float) -> tuple[list[float], float]:
    """Clients that each wait for their answer: how long each answer took, and all of them together."""
    clients = [connect() for _ in range(num_clients)]
    took: list[float] = []

    def run(send: Send, number: int, end: float, into: list[float]) -> None:
        while (started := time.perf_counter()) < end:
            assert send(number) == 4 * num_rows
            into.append(time.perf_counter() - started)
            number += num_clients

    for into, length in (([], min(1.0, seconds)), (took, seconds)):  # the first warms up
        started = time.perf_counter()
        threads = [threading.Thread(target=run, args=(send, i, started + length, into))
                   for i, send in enumerate(clients)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    return took, time.perf_counter() - started


def server_clock(url: str, route: str) -> dict[float, float]:
    """How many requests the server took at most so many seconds for."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=60) as answer:
        text = answer.read().decode()
    found = re.findall(rf'embark_serve_request_seconds_bucket{{le="([^"]+)",route="{route}"}} (\S+)', text)
    return {float(le): float(count) for le, count in found}


def measure_server(place: Path, device: ScoringDevice, requests: list[Request], num_rows: int, seconds: float) -> None:
    process = subprocess.Popen([sys.executable, __file__, "--serve", str(place), "--device", device.kind, "--precision",
                                device.precision], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            raise SystemExit("the server does not start")
        listening = json.loads(line)
        print(f"  {listening['device']}" + (f"; {listening['note']}" if listening["note"] else ""))
        roads = {"HTTP": (lambda: http_client(listening["url"], requests), "infer")}
        if listening["grpc"]:
            roads["gRPC"] = (lambda: grpc_client(listening["grpc"], requests), "grpc infer")
        for road, (connect, route) in roads.items():
            for num_clients in (1, 4, 16):
                before = server_clock(listening["url"], route)
                took, all_s = drive(connect, num_clients, num_rows, seconds)
                after = server_clock(listening["url"], route)
                counts = {le: after[le] - before.get(le, 0) for le in after}
                within = {le: counts[le] / max(1, counts[float("inf")]) for le in (0.0005, 0.001, 0.002, 0.005)}
                print(f"  {road}, {num_clients:2} clients: {num_rows * len(took) / all_s:12,.0f} candidates/s, "
                      f"{percentiles(took)}; in the server's clock within 0.5 / 1 / 2 / 5 ms: "
                      + " / ".join(f"{share:.1%}" for share in within.values()))
    finally:
        process.terminate()
        process.wait(60)


def serve(place: str, device: ScoringDevice) -> None:
    """The server's process. Raw tensors of numbers need no pyarrow; where it is not installed, a stand-in is imported
    that raises as soon as anything of it is used."""
    note = ""
    if importlib.util.find_spec("pyarrow") is None:
        note = "without pyarrow"
        for name in ("pyarrow", "pyarrow.compute", "pyarrow.types", "pyarrow.parquet", "pyarrow.csv"):
            sys.modules[name] = module = _Absent(name)
            module.__path__ = []
    from embark.serve.server import Endpoint, Listening
    from embark.serve.server import serve as serve_model

    def report(listening: Listening) -> None:
        print(json.dumps({"url": listening.url, "grpc": listening.grpc, "device": listening.device, "note": note}),
              flush=True)

    endpoint = Endpoint(port=0, grpc_port=0 if has_grpc() else None)
    serve_model(place, name=NAME, device=device, poll_s=0, on_start=report, endpoint=endpoint)


class _Absent(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name[0].isupper():  # for isinstance and except
            return type(name, (Exception,), {})
        return (lambda *_: None) if name == "timestamp" else _absent  # a constant of a module


def _absent(*_: Any, **__: Any) -> Any:
    raise ModuleNotFoundError("pyarrow is used here, and is not installed")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="cuda")
    parser.add_argument("--precision", choices=["fp32", "tf32", "bf16"], help="one alone; the server's")
    parser.add_argument("--tables", choices=["fp32", "fp16", "int8", "int4"], default="int8")
    parser.add_argument("--scale", type=float, default=1 / 8, help="of the tables' rows")
    parser.add_argument("--candidates", type=int, default=1024)
    parser.add_argument("--seconds", type=float, default=3.0, help="of each measurement over loopback")
    parser.add_argument("--tiny", action="store_true", help="small tables and layers, to try the script")
    parser.add_argument("--serve", metavar="PLACE", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        serve(args.serve, ScoringDevice(args.device, args.precision))
        return
    started = time.perf_counter()
    changes = ["model.bottom_mlp=[32]", "model.top_mlp=[32]", "model.embedding_dim=16"] if args.tiny else []
    model = load_spec("criteo-1tb", changes).model
    scale, candidates = (1e-5, 64) if args.tiny else (args.scale, args.candidates)
    model = model.model_copy(update={"rows_per_table": tuple(max(3, int(t.rows * scale)) for t in model.table_list())})
    precisions: list[Precision] = [args.precision] if args.precision else ["fp32"] if args.device == "cpu" else \
        ["fp32", "tf32", "bf16"]
    seconds = 0.3 if args.tiny else args.seconds
    with tempfile.TemporaryDirectory() as folder:
        make_artifact(Path(folder), model, args.tables)
        artifact = open_artifact(folder)
        num_rows = sum(table.rows for table in model.table_list())
        print(f"DLRM, {len(model.table_list())} tables of {num_rows:,} rows, D = {model.embedding_dim}, {args.tables}, "
              f"{artifact.num_bytes / 1e9:.2f} GB: made in {time.perf_counter() - started:.0f} s")
        requests = make_requests(artifact, candidates)
        for precision in precisions:
            loading = time.perf_counter()
            opened = open_model(artifact, "", ScoringDevice(args.device, precision))
            print(f"engine, {precision}: {opened.device}, loaded in {time.perf_counter() - loading:.1f} s")
            check_numbers(artifact, opened, precision, 256 if args.tiny else 4096)
            sizes = [1, 64] if args.tiny else [1, 128, 1024, 4096, 16_384, 131_072]
            measure_engine(artifact, opened, sizes, 0.1 if args.tiny else 1.0)
            del opened
        for precision in precisions[1:] or precisions:
            print(f"server, {precision}, requests of {candidates:,} candidates, client on the same machine")
            measure_server(Path(folder), ScoringDevice(args.device, precision), requests, candidates, seconds)
    print(f"{time.perf_counter() - started:.0f} s in all")


if __name__ == "__main__":
    main()
