"""The ranks of a run: who I am, what I run on, and the process group that joins us."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from embark.errors import EmbarkError, Fault, UserError
from embark.spec import PlaceSpec
from embark.spec.user_code import user_error

CAPTURED: WeakSet[torch.cuda.CUDAGraph] = WeakSet()
"""Graphs that may hold collectives: NCCL waits for their end before it ends a communicator, without end."""


@dataclass(frozen=True, slots=True)
class World:
    """One process among the ranks of a run."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    device: torch.device
    timeout: timedelta = timedelta(minutes=10)  # Limit for waiting for another rank.

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, which logs and decides for all."""
        return self.rank == 0

    @property
    def is_host_leader(self) -> bool:
        """Whether this is the first rank of its host."""
        return self.local_rank == 0

    @property
    def device_type(self) -> str:
        return self.device.type

    @property
    def num_devices(self) -> int:
        """Number of devices: one for each rank."""
        return self.world_size

    @property
    def devices_per_host(self) -> int:
        return self.local_world_size

    @property
    def device_name(self) -> str:
        """Name such as `NVIDIA H200`, or the number of threads on a CPU."""
        if self.device.type == "cuda":
            return torch.cuda.get_device_name(self.device)
        threads = torch.get_num_threads()
        return f"{threads} CPU thread{'s' if threads > 1 else ''}"

    @property
    def device_bytes(self) -> int:
        """Bytes of the GPU's memory; 0 on a CPU."""
        return torch.cuda.get_device_properties(self.device).total_memory if self.device.type == "cuda" else 0

    def sum_over_ranks(self, values: torch.Tensor) -> torch.Tensor:
        """Add `values` up over all ranks, in place."""
        if self.world_size > 1:
            dist.all_reduce(values)
        return values

    def sum_of(self, numbers: list[int]) -> list[int]:
        """Add small whole numbers up over all ranks, on the CPU."""
        if self.world_size == 1:
            return numbers
        return self.sum_over_ranks(torch.tensor(numbers, dtype=torch.int32)).tolist()

    def stacked(self, values: torch.Tensor) -> torch.Tensor:
        """Return every rank's `values`, all of one shape, on every rank: [ranks, ...]."""
        every = torch.empty(self.world_size, *values.shape, dtype=values.dtype, device=values.device)
        dist.all_gather_into_tensor(every.view(-1), values.reshape(-1))
        return every

    def gathered(self, value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
        """Return every rank's `value` on every rank."""
        if self.world_size == 1:
            return [value]
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value, group)
        return values


@contextmanager
def join(place: PlaceSpec) -> Iterator[World]:
    """Join the process group that torchrun describes, or a group of one where nothing does."""
    rank, world_size = _env("RANK", 0), _env("WORLD_SIZE", 1)
    local_rank, local_world_size = _env("LOCAL_RANK", 0), _env("LOCAL_WORLD_SIZE", 1)
    device = _device(place, local_rank)
    backend = backend_for(device)
    timeout = timedelta(seconds=place.timeout_s)
    excepthook = sys.excepthook
    try:
        store = _meeting_store(rank, world_size, local_world_size, timeout)
        dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)
    except (RuntimeError, ValueError) as error:
        raise Fault(f"rank {rank} of {world_size} could not join the others: {error}",
                    "start all ranks with torchrun, with one rendezvous endpoint they can all reach") from error
    try:
        yield World(rank, world_size, local_rank, local_world_size, device, timeout)
    except RuntimeError as error:  # raised before the run's log was open
        if known := explain(error):
            raise known from error
        raise
    finally:
        for graph in list(CAPTURED):
            graph.reset()
        dist.destroy_process_group()
        if world_size == 1:  # among several ranks torch's prefix, `[rank0]:`, says whose traceback it is
            sys.excepthook = excepthook


def backend_for(device: torch.device) -> str:
    """Choose NCCL, with gloo beside it: saving in the background and agreeing on a step go over the CPU."""
    return "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"


def _meeting_store(rank: int, world_size: int, local_world_size: int, timeout: timedelta) -> dist.Store:
    """Return the store in which the ranks find each other; it is in this process alone where there are no others."""
    if "MASTER_ADDR" not in os.environ:
        return dist.HashStore()
    store, _, _ = next(rendezvous("env://", rank, world_size, timeout=timeout))
    store.set_timeout(timeout)
    if local_world_size < world_size:
        return store
    # torchrun gives all its restarts one store, where ranks would find the addresses of the dead (pytorch#135712).
    # Its count tells them apart on one machine; on several each counts alone, and torchrun itself has to be told
    # TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1.
    return dist.PrefixStore(f"restart-{_env('TORCHELASTIC_RESTART_COUNT', 0)}", store)


def _env(name: str, default: int) -> int:
    text = os.environ.get(name, "")
    try:
        return int(text) if text else default
    except ValueError as error:
        raise UserError(f"the environment's {name} is {text!r}, not a number", "start with torchrun") from error


def _device(place: PlaceSpec, local_rank: int) -> torch.device:
    num_gpus = torch.cuda.device_count()
    if place.device == "cpu" or (place.device == "auto" and not num_gpus):
        return torch.device("cpu")
    if not num_gpus:
        raise UserError('place.device is "cuda", and torch sees no GPU here',
                        '`embark doctor` says why; or set place.device = "auto"')
    if local_rank >= num_gpus:
        raise UserError(f"local rank {local_rank} has no GPU: this machine has {num_gpus}",
                        f"torchrun --nproc_per_node={num_gpus}")
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    return device


LESS_MEMORY = 'a smaller train.batch_size, smaller tables, train.table_dtype = "fp16", or more ranks'
LOST_PEER = ("connection closed by peer", "connection reset by peer", "gloo", "nccl", "timed out waiting")


def explain(error: Exception) -> EmbarkError | None:
    """Return the error as one of ours, or None if it is unknown."""
    if not isinstance(error, RuntimeError):
        return user_error(error)
    text = str(error)
    if isinstance(error, torch.OutOfMemoryError):
        return UserError(f"out of GPU memory: {text.splitlines()[0]}",
                         LESS_MEMORY)
    if "DefaultCPUAllocator" in text or "not enough memory" in text:
        return UserError(f"out of host memory: {text.splitlines()[0]}", LESS_MEMORY)
    if isinstance(error, dist.DistError) or any(sign in text.lower() for sign in LOST_PEER):
        return Fault(f"a rank was lost: {text.splitlines()[0]}",
                     "start the run again: it resumes from its last checkpoint")
    return user_error(error)
