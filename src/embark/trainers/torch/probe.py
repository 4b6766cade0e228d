"""`python -m embark.trainers.torch.probe FILE`: torch's versions and devices, and whether ranks of this machine can
reach each other, as one JSON object in FILE. A process of its own, so that the caller need not load torch."""

import json
import os
import sys
import tempfile
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

TIMEOUT = timedelta(seconds=40)
NUM_CPU_RANKS = 2
GPU_FLOATS = 1 << 26
CPU_FLOATS = 1 << 20
NUM_ROUNDS = 5


def main() -> int:
    facts: dict[str, Any] = {
        "torch": torch.__version__, "cuda": torch.version.cuda, "num_gpus": 0, "arches": [], "nccl": "", "trouble": "",
    }
    try:
        facts["num_gpus"] = torch.cuda.device_count()
        if facts["num_gpus"]:
            facts["arches"] = torch.cuda.get_arch_list()
        if torch.cuda.is_available() and dist.is_nccl_available():
            facts["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    except RuntimeError as error:
        facts["trouble"] = str(error).splitlines()[0]
    facts["reduce"] = reduce_here(int(facts["num_gpus"]))
    if facts["num_gpus"] == 1 and facts["nccl"]:
        facts["reduce"]["nccl_error"], _ = _spawn("nccl", 1)
    with open(sys.argv[1], "w", encoding="utf-8") as file:
        json.dump(facts, file)
    return 0


def reduce_here(num_gpus: int) -> dict[str, Any]:
    """Do a real all-reduce: by NCCL over this machine's GPUs where there are two, else by gloo over two processes."""
    backend, num_ranks = ("nccl", num_gpus) if num_gpus > 1 else ("gloo", NUM_CPU_RANKS)
    error, measured = _spawn(backend, num_ranks)
    return {"backend": backend, "num_ranks": num_ranks, "error": error, "bytes_per_s": 0.0, **measured}


def _spawn(backend: str, num_ranks: int) -> tuple[str, dict[str, Any]]:
    """Return what went wrong, or nothing, and what rank 0 measured. One GPU alone shows that NCCL starts."""
    with tempfile.TemporaryDirectory(prefix="embark-doctor-") as folder:
        try:
            # Spawned for GPUs, whose state does not survive a fork; forked for the CPU, where torch is loaded already.
            mp.start_processes(_rank, (backend, num_ranks, folder), nprocs=num_ranks,
                               start_method="spawn" if backend == "nccl" else "fork")
        except Exception as error:
            return str(error).strip().splitlines()[-1] if str(error).strip() else type(error).__name__, {}
        with open(os.path.join(folder, "result"), encoding="utf-8") as file:
            return "", json.load(file)


def _rank(rank: int, backend: str, num_ranks: int, folder: str) -> None:
    store = dist.FileStore(os.path.join(folder, "store"), num_ranks)
    device = torch.device("cuda", rank) if backend == "nccl" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(backend, store=store, rank=rank, world_size=num_ranks, timeout=TIMEOUT)
    try:
        values = torch.full((GPU_FLOATS if device.type == "cuda" else CPU_FLOATS,), float(rank + 1), device=device)
        dist.all_reduce(values)
        expected = num_ranks * (num_ranks + 1) / 2
        if not bool((values == expected).all()):
            raise RuntimeError(f"the sum over {num_ranks} ranks is {values[0].item()}, not {expected}")
        elapsed_s = _best_s(values)
        if rank == 0:
            # Bus bandwidth, as nccl-tests reckons it: what each rank sends and gets.
            moved = values.numel() * 4 * 2 * (num_ranks - 1) / num_ranks
            with open(os.path.join(folder, "result"), "w", encoding="utf-8") as file:
                json.dump({"bytes_per_s": moved / elapsed_s, "num_bytes": values.numel() * 4}, file)
        dist.barrier()
    finally:
        dist.destroy_process_group()


def _best_s(values: torch.Tensor) -> float:
    """Return the shortest of some rounds."""
    times = []
    for _ in range(NUM_ROUNDS):
        if values.is_cuda:
            torch.cuda.synchronize()
        began_s = time.perf_counter()
        dist.all_reduce(values)
        if values.is_cuda:
            torch.cuda.synchronize()
        times.append(time.perf_counter() - began_s)
    return max(min(times), 1e-9)


if __name__ == "__main__":
    sys.exit(main())
