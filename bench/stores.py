"""Saving and loading a checkpoint: Embark's files behind an object store, to a folder and to emulators of the clouds,
beside `torch.save`, DCP's own `FileSystemWriter` and its `FsspecWriter`, all in one run on this machine.

    python bench/stores.py [--mib 256] [--times 3]

Emulators share the processors with the client, so the ratios say more than the rates.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from uuid import uuid4

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
os.environ.setdefault("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from integration.cloud import emulators
from rich.console import Console
from rich.table import Table

from embark.store import ChecksumWriter, ObjectStore, open_store
from embark.store.checkpoint_arrays import INDEX, CheckpointArrays, Index, unsharded, write_pieces
from embark.trainers.torch.checkpoint import fill, local_shards

State = dict[str, torch.Tensor]
Road = tuple[str, Callable[[State], None], Callable[[State], None]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--mib", type=int, default=256)
    parser.add_argument("--times", type=int, default=3)
    asked = parser.parse_args()
    warnings.filterwarnings("ignore")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    state = {f"table-{n}": torch.randn(asked.mib << 14, 1) for n in range(16)}
    table = Table(title=f"{asked.mib} MiB in 16 tensors, median of {asked.times}, MiB/s")
    for heading in ("road", "save", "load"):
        table.add_column(heading, justify="left" if heading == "road" else "right")
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        for name, put, get in roads(folder, stack):
            rates = [measure(put, get, state, asked.mib) for _ in range(asked.times)]
            table.add_row(name, *(f"{statistics.median(column):,.0f}" for column in zip(*rates, strict=True)))
    Console().print(table)
    dist.destroy_process_group()


def roads(folder: Path, stack: ExitStack) -> list[Road]:
    """Each way to save and load, the plain ones first."""
    file, dcp_folder = folder / "torch.pt", folder / "dcp"

    def to_file(state: State) -> None:
        torch.save(state, file)
        with file.open("rb") as saved:
            os.fsync(saved.fileno())

    def from_file(state: State) -> None:
        for name, tensor in torch.load(file, weights_only=True).items():
            state[name].copy_(tensor)

    found: list[Road] = [
        ("torch.save, local, synced", to_file, from_file),
        ("DCP FileSystemWriter, 2 threads",
         lambda state: dcp.save(state, storage_writer=dcp.FileSystemWriter(dcp_folder, thread_count=2)),
         lambda state: dcp.load(state, storage_reader=dcp.FileSystemReader(dcp_folder))),
        road("Embark, local folder", open_store(folder / "embark")),
    ]
    s3 = stack.enter_context(emulators.s3())
    os.environ.update(s3.env)
    found.append(road("Embark, s3 (moto)", open_store(s3.uri)))
    try:
        found.append(fsspec_road("DCP FsspecWriter, s3fs (moto), 4 threads", s3))
    except ImportError:
        Console().print("no s3fs here, so DCP's FsspecWriter is not measured: pip install s3fs")
    os.environ.update(emulators.gs_xml(s3).env)
    found.append(road("Embark, gs by XML (moto)", open_store(s3.uri.replace("s3://", "gs://"))))
    if shutil.which("azurite-blob"):
        az = stack.enter_context(emulators.az())
        os.environ.update(az.env)
        found.append(road("Embark, az (azurite)", open_store(az.uri)))
    gs = stack.enter_context(emulators.gs())
    os.environ.update(gs.env)
    found.append(road("Embark, gs by gcsfs (gcp-storage-emulator)", open_store(gs.uri)))
    return found


def road(name: str, object_store: ObjectStore) -> Road:
    folder = uuid4().hex

    def save(state: State) -> None:
        pieces = [unsharded(key, tensor.numpy()) for key, tensor in state.items()]
        entries = write_pieces(ChecksumWriter(object_store), folder, 0, pieces)
        object_store.write(f"{folder}/{INDEX}", Index(entries).to_json())

    return name, save, lambda state: fill(local_shards(state), CheckpointArrays(object_store, folder))


def fsspec_road(name: str, s3: emulators.Emulator) -> Road:
    import s3fs  # noqa: F401
    from torch.distributed.checkpoint import _fsspec_filesystem as plain

    uri = f"{s3.uri}/{uuid4().hex}"
    options = {"endpoint_url": s3.env["AWS_ENDPOINT_URL"], "default_block_size": 64 << 20, "default_cache_type": "none"}
    return (
        name,
        lambda state: dcp.save(state, storage_writer=plain.FsspecWriter(uri, thread_count=4, **options)),
        lambda state: dcp.load(state, storage_reader=plain.FsspecReader(uri, **options)),
    )


def measure(put: Callable[[State], None], get: Callable[[State], None], state: State, mib: int) -> tuple[float, float]:
    began = time.perf_counter()
    put(state)
    between = time.perf_counter()
    back = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    start = time.perf_counter()
    get(back)
    end = time.perf_counter()
    if not all(torch.equal(back[name], state[name]) for name in state):
        raise SystemExit("what came back is not what went")
    return mib / (between - began), mib / (end - start)


if __name__ == "__main__":
    main()
