"""The processes and devices of a run: who I am, what JAX found, and the mesh that all devices form."""

import os
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from itertools import count
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from embark.errors import Fault, UserError
from embark.features.arrays import Array
from embark.spec import PlaceSpec
from embark.values import frozen
from .exchange import AXIS, samples_on

DEFAULT_PORT = 29500
MAX_SILENCE_S = 100  # Silence after which a process counts as dead: JAX's own limit.


@frozen
class World:
    """One process among those of a run; each has some of its devices."""

    rank: int
    world_size: int  # Number of processes.
    mesh: Mesh
    kind: str  # `cpu`, `gpu` or `tpu`.
    timeout_s: int = 600  # Limit for waiting for another process.

    @property
    def is_first(self) -> bool:
        """Whether this is process 0, which logs and decides for all."""
        return self.rank == 0

    @property
    def num_devices(self) -> int:
        """Number of devices of all processes together."""
        return int(self.mesh.devices.size)

    @property
    def local_devices(self) -> list[tuple[int, jax.Device]]:
        """This process's devices, with their indices in the mesh."""
        return [(at, d) for at, d in enumerate(self.mesh.devices.flat) if d.process_index == self.rank]

    @property
    def is_host_leader(self) -> bool:
        """Always true: a host has one process, with all of its devices."""
        return True

    @property
    def device_type(self) -> str:
        return self.kind

    @property
    def device_bytes(self) -> int:
        """Always None: JAX does not know before it has allocated."""
        return 0

    @property
    def devices_per_host(self) -> int:
        return self.num_devices // self.world_size

    @property
    def device_name(self) -> str:
        """Name such as `TPU v5 lite`, `NVIDIA H200`, or `8 CPU devices`."""
        name = self.mesh.devices.flat[0].device_kind
        if self.kind == "cpu":
            return f"{self.num_devices} CPU device{'s' if self.num_devices > 1 else ''} of JAX"
        return f"{self.num_devices} x {name}" if self.num_devices > 1 else name

    @property
    def rows(self) -> NamedSharding:
        """Sharding with a part of the first axis on each device."""
        return NamedSharding(self.mesh, samples_on(0))

    @property
    def replicated_sharding(self) -> NamedSharding:
        """Sharding with the complete array on every device."""
        return NamedSharding(self.mesh, P())

    def to_devices(self, values: Array, *, axis: int = 0) -> jax.Array:
        """Put this process's samples on its devices, as its part of an array over all of them; `axis` goes over
        samples."""
        sharding = NamedSharding(self.mesh, samples_on(axis))
        if self.world_size == 1:
            return jax.device_put(values, sharding)
        return jax.make_array_from_process_local_data(sharding, values)

    def replicated(self, values: Array) -> jax.Array:
        """Put values on every device; every process passes the same values."""
        return jax.make_array_from_callback(values.shape, self.replicated_sharding, lambda index: values[index])

    def fetch(self, array: jax.Array) -> Array:
        """Return an array of any sharding, complete, on the host; every process must call it."""
        if self.world_size > 1 and not array.is_fully_addressable and not array.is_fully_replicated:
            array = _gathering(self.replicated_sharding)(array)
        return np.asarray(array.addressable_data(0) if self.world_size > 1 else array)

    def sum_of(self, numbers: list[int]) -> list[int]:
        """Add small whole numbers up over all processes."""
        if self.world_size == 1:
            return numbers
        return [sum(column) for column in zip(*self.gathered(numbers), strict=True)]

    def gathered(self, value: Any, channel: str = "main") -> list[Any]:
        """Return every process's `value` on every process.

        It goes through JAX's own coordinator, not through the devices, so a thread that saves may call it while the
        devices train; each thread takes a channel of its own.
        """
        if self.world_size == 1:
            return [value]
        from jax._src import distributed  # no public name, and the coordinator has no other store

        client: Any = distributed.global_state.client
        about = f"embark/{channel}/{next(_CHANNELS.setdefault(channel, count()))}"
        try:
            client.key_value_set_bytes(f"{about}/{self.rank}", pickle.dumps(value))
            texts = [client.blocking_key_value_get_bytes(f"{about}/{r}", self.timeout_s * 1000)
                     for r in range(self.world_size)]
            client.wait_at_barrier(f"{about}/read", self.timeout_s * 1000)
            client.key_value_delete(f"{about}/{self.rank}")
        except RuntimeError as error:
            raise Fault(f"a process was lost: {str(error).splitlines()[0]}",
                        "start the run again: it resumes from its last checkpoint") from error
        return [pickle.loads(text) for text in texts]


@lru_cache
def _gathering(sharding: NamedSharding) -> Callable[[jax.Array], jax.Array]:
    """Return a program that gathers an array; it is cached, since a new one would be compiled again."""
    return jax.jit(lambda array: array, out_shardings=sharding)


_CHANNELS: dict[str, Iterator[int]] = {}  # Number of gathers of each channel, the same on every process.


@contextmanager
def join(place: PlaceSpec) -> Iterator[World]:
    """Join the processes that the environment describes, or be alone where it describes none."""
    is_joined = _join_others(place)
    try:
        devices = sorted(_devices(place), key=lambda d: (d.process_index, d.id))
        mesh = Mesh(np.array(devices), (AXIS,))
        yield World(jax.process_index(), jax.process_count(), mesh, devices[0].platform, place.timeout_s)
    finally:
        if is_joined:
            jax.distributed.shutdown()


def _devices(place: PlaceSpec) -> list[jax.Device]:
    wants_tpu = place.device in ("tpu", "auto")
    try:
        devices = list(jax.devices("tpu") if wants_tpu else jax.devices())
    except RuntimeError as error:
        if not wants_tpu:
            raise Fault(f"JAX could not start its devices: {str(error).splitlines()[0]}") from error
        raise UserError(f'place.device = "{place.device}" asks for TPUs, and JAX sees none here: '
                        f"{str(error).splitlines()[0]}",
                        """pip install 'embark-rec[tpu]' on a machine with TPUs; or place.device = "jax" """
                            "takes whatever JAX finds") from error
    return devices


def _join_others(place: PlaceSpec) -> bool:
    """Join by torchrun's names, by JAX's own, or by what a slice of TPUs knows of itself."""
    address, processes, rank = _described()
    if processes == 1:
        return False
    # JAX's own answer to SIGTERM would take ours away, and leave a run that is to stop running.
    jax.config.update("jax_enable_preemption_service", False)
    try:
        if processes is None:
            return place.device != "jax" and _join_slice(place.timeout_s)
        jax.distributed.initialize(address, processes, rank, **_waits(place.timeout_s))
    except RuntimeError as error:
        raise Fault(f"process {rank or 0} of {processes or 'a slice'} could not join the others: "
                    f"{str(error).splitlines()[0]}",
                    "start all processes with one coordinator address that they can all reach") from error
    return True


def _join_slice(timeout_s: int) -> bool:
    """GKE describes a slice's hosts in the environment, a TPU machine in its metadata: JAX asks both."""
    try:
        jax.distributed.initialize(**_waits(timeout_s))
    except ValueError:  # neither describes one
        return False
    return True


def _waits(timeout_s: int) -> dict[str, int]:
    """Return how long to wait for the others to come and, once they are there, for a sign of life.

    A process that hangs with its devices, as all do when one has died, is ended by JAX after the latter.
    """
    return {"initialization_timeout": timeout_s, "heartbeat_timeout_seconds": min(timeout_s, MAX_SILENCE_S)}


def _described() -> tuple[str | None, int | None, int | None]:
    """Return the coordinator's address, the number of processes and this one's index, or None if nothing describes
    them."""
    for size, rank in (("JAX_NUM_PROCESSES", "JAX_PROCESS_ID"), ("WORLD_SIZE", "RANK")):
        if size not in os.environ:
            continue
        port = os.getenv("MASTER_PORT", DEFAULT_PORT)
        own = f"{os.environ['MASTER_ADDR']}:{port}" if "MASTER_ADDR" in os.environ else None
        address = os.getenv("JAX_COORDINATOR_ADDRESS", own)
        number = _number(size)
        if number > 1 and address is None:
            raise UserError(f"{size} is {number}, and nothing names the coordinator",
                            "set JAX_COORDINATOR_ADDRESS=host:port, or MASTER_ADDR and MASTER_PORT")
        return address, number, _number(rank)
    return None, None, None


def _number(name: str) -> int:
    text = os.getenv(name, "")
    if not text.isdigit():
        raise UserError(f"the environment's {name} is {text!r}, not a number",
                        "JAX_NUM_PROCESSES and JAX_PROCESS_ID, or WORLD_SIZE and RANK, are set together")
    return int(text)

