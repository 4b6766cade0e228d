"""What is predicted of a run on a number of machines: the values that memory, time, cost and verdict share."""


from embark.catalog import Machine
from embark.model.placement import Cluster, Placement, all_table_bytes
from embark.spec import RunSpec
from embark.values import frozen, read_table

GIB = 1024.0**3
ASSUMPTIONS: dict[str, dict[str, float]] = read_table(__file__, "assumptions.toml")


@frozen
class Setup:
    """A spec on a number of machines of one type."""

    spec: RunSpec
    machine: Machine
    num_nodes: int  # Machines, or slices of a TPU.

    @property
    def num_ranks(self) -> int:
        return self.num_nodes * self.machine.num_gpus

    @property
    def title(self) -> str:
        """The setup as `2 x p5.48xlarge`, by the shortest of its names."""
        own = self.machine.name
        short = min((own, *self.machine.also), key=lambda name: (not own.endswith(name), len(name)))
        return short if self.num_nodes == 1 else f"{self.num_nodes} x {short}"

    @property
    def description(self) -> str:
        """The setup as `one a2-highgpu-1g (1 x A100)`."""
        return f"{'one ' if self.num_nodes == 1 else ''}{self.title} ({self.num_ranks} x {self.machine.gpu.name})"


@frozen
class MemoryUse:
    """Bytes on the fullest rank, part by part."""

    device: dict[str, float]
    """`tables`, `optimizer state`, `dense layers`, `activations`, `input buffers`, `exchange`, `fragmentation`,
    `CUDA and libraries`, `NCCL`, `evaluation`: in this order, those that are there. On a TPU `tables`,
    `optimizer state`, `dense layers`, `batches`, `exchange and activations`, `tables copied`, `program`."""
    device_limit: float  # Bytes of the accelerator, as its driver shows them.
    host: dict[str, float]  # Bytes of one host: `tables`, `processes`, `loader`, `checkpoint copy`.
    host_limit: float  # Bytes of a host that pods may request; 0 if not known.

    @property
    def device_total(self) -> float:
        return sum(self.device.values())

    @property
    def host_total(self) -> float:
        return sum(self.host.values())

    @property
    def fits(self) -> bool:
        return self.device_total <= self.device_limit and not self.host_shortage

    @property
    def host_shortage(self) -> str:
        """A sentence about the memory that a host lacks; empty if it has enough."""
        if not self.host_limit or self.host_total <= self.host_limit:
            return ""
        parts = ", ".join(f"{name} {size / GIB:,.1f}" for name, size in self.host.items())
        return f"a host needs {self.host_total / GIB:,.1f} GiB and has {self.host_limit / GIB:,.1f} available: {parts}"


@frozen
class StepTime:
    """Seconds of one step, part by part. Parts overlap as the engine allows; `total_s` is the result."""

    parts_s: dict[str, float]
    """`lookup and update`, `dense layers`, `optimizer`, `all-to-all`, `all-reduce`, `host memory`, `launches`,
    `copy to the device`, `loader`, `storage`."""
    total_s: float
    bound_by: str  # The part that sets it.
    is_calibrated: bool
    """The rates were measured on this accelerator; else they are scaled from its datasheet: an estimate."""
    basis: str  # A sentence on where the rates come from.


@frozen
class Prediction:
    """The predicted memory, time and cost of a run on a setup."""

    setup: Setup
    engine: str  # `cuda_graph` or `pipeline`; on TPUs `jax`.
    engine_why: str
    placement: Placement | None  # None where the tables do not fit at all.
    memory: MemoryUse
    step: StepTime | None  # None where it does not fit.
    fits: bool
    why: str  # One sentence: why it fits, or what is too large for what.
    notes: tuple[str, ...] = ()  # Assumptions and caveats, one line each.

    @property
    def samples_per_s(self) -> float:
        return 0.0 if self.step is None else self.setup.spec.train.batch_size / self.step.total_s


def refused(setup: Setup, cluster: Cluster, why: str, notes: tuple[str, ...] = ()) -> Prediction:
    """Return the prediction of a run that does not fit, or that its trainer refuses."""
    memory = MemoryUse({"tables and optimizer state": all_table_bytes(setup.spec) / cluster.num_ranks},
                       cluster.device_bytes, {}, cluster.host_bytes)
    return Prediction(setup, "", "", None, memory, None, False, why, notes)
