"""What checkpoints take: bytes, the pause of a save, the time until it is committed, and how often is best."""

import math
from dataclasses import dataclass

from embark.model.placement import all_table_bytes, shard_bytes
from embark.model.work import layers_of
from embark.plan.prediction import Prediction
from embark.spec import RunSpec
from embark.store.checkpoint_interval import steps_between_saves

DENSE_STATE_BYTES = {"sgd": 0, "adagrad": 4, "adam": 8}
"""What the dense optimizer keeps for each weight."""
COPY_SHARE = 0.75
"""Of the bus one way: an H200 host copied 680 MB to pinned memory in 14 ms, 48 GB/s of 64."""
UNKNOWN_BUS_GBYTE_PER_S = 32.0
"""One way, where the catalog has no figure: PCIe of the fourth generation."""
WRITE_GBYTE_PER_S = 1.25
"""Of one process, with checksums and commit: 680 MB took 0.45 to 0.62 s on an H200's host."""
LOAD_GBYTE_PER_S = 1.4
"""Of one process, every checksum verified: as measured on two cores of a Xeon."""
NETWORK_SHARE = 0.7
"""Of a host's network that a store's many requests together reach; an assumption."""
UNKNOWN_NETWORK_GBIT_PER_S = 25.0
COMMIT_S = 1.0
"""Ranks agree, small files are written, the older checkpoint goes."""


@dataclass(frozen=True, slots=True)
class Failures:
    """How often a run's machines go, all of them together."""

    per_hour: float
    grace_s: float
    """From a notice to the end, as the trainer counts with it."""
    has_notice: bool
    """Spot gives notice; a machine that breaks does not."""
    why: str

    @property
    def mtbf_s(self) -> float:
        return 3600 / self.per_hour if self.per_hour else math.inf


@dataclass(frozen=True, slots=True)
class SaveBytes:
    """What is written: in all, and the most that a rank has, that a process writes, that a host writes."""

    checkpoint: float
    rank: float
    process: float
    """A rank has one of its own; on TPUs all chips of a host share one."""
    host: float


@dataclass(frozen=True, slots=True)
class Saves:
    """The checkpoints of a run."""

    checkpoint_bytes: float
    """Tables, their optimizer's state, the dense layers and theirs."""
    host_bytes: float
    """The most that one host writes of it."""
    pause_s: float
    """How long training stands still in a save."""
    write_s: float
    """From the beginning of a save to its commit."""
    load_s: float
    """At a restart."""
    every_steps: int
    """0: no save before the end."""
    every_s: float
    """Of training between two saves; 0: there is no save before the end."""
    why: str
    fits_notice: bool
    """A notice comes, and a step and a save end after it in time, so that nothing is lost."""
    lost_each_s: float
    """Training that a failure is expected to undo: half an interval, and what went on while a save was written."""
    num_saves: int
    """Before the last."""
    has_last: bool

    @property
    def total_s(self) -> float:
        """How long the run waits for saves: their pauses, and all of the last one."""
        return self.num_saves * self.pause_s + (self.write_s if self.has_last else 0.0)


def checkpoint_bytes(spec: RunSpec) -> float:
    """Of a whole checkpoint, but for a few kB of small files."""
    return all_table_bytes(spec) + _dense_bytes(spec)


def save_bytes(prediction: Prediction) -> SaveBytes:
    """By where the tables are; rank 0 writes the dense layers."""
    placement, setup = prediction.placement, prediction.setup
    if placement is None:
        raise ValueError("what does not fit saves nothing")
    by_rank = [0.0] * placement.num_ranks
    for shard in placement.shards:
        by_rank[shard.rank] += shard_bytes(shard, setup.spec)
    by_rank[0] += _dense_bytes(setup.spec)
    each = setup.machine.gpus_per_host
    host = max(sum(by_rank[i : i + each]) for i in range(0, len(by_rank), each))
    return SaveBytes(sum(by_rank), max(by_rank), host if setup.machine.gpu.kind == "tpu" else max(by_rank), host)


def saves_of(
    prediction: Prediction, num_steps: int, failures: Failures, written: SaveBytes | None = None
) -> Saves:
    """For a prediction that fits. `written`: its `save_bytes`, where they are known already."""
    step, setup = prediction.step, prediction.setup
    if step is None:
        raise ValueError("what does not fit saves nothing")
    written = written or save_bytes(prediction)
    spec, machine = setup.spec, setup.machine
    network_gbit = machine.network_gbit_per_s or UNKNOWN_NETWORK_GBIT_PER_S
    host_rate = network_gbit / 8 * NETWORK_SHARE * 1e9
    write_s = max(written.process / (WRITE_GBYTE_PER_S * 1e9), written.host / host_rate) + COMMIT_S
    load_s = max(written.process / (LOAD_GBYTE_PER_S * 1e9), written.host / host_rate)
    bus = (machine.gpu.pcie_gbyte_per_s or 2 * UNKNOWN_BUS_GBYTE_PER_S) / 2 * COPY_SHARE * 1e9
    pause_s = written.rank / bus if spec.store.in_background else write_s
    write_s = max(write_s, pause_s)
    every_steps, why = _interval(spec, pause_s, write_s, step.total_s, failures)
    every_s, train_s = every_steps * step.total_s, num_steps * step.total_s
    fits_notice = failures.has_notice and step.total_s + write_s <= failures.grace_s
    lost_s = every_s / 2 + write_s - pause_s if every_steps else train_s / 2
    return Saves(
        written.checkpoint, written.host, pause_s, write_s, load_s, every_steps, every_s, why, fits_notice,
        lost_each_s=0.0 if fits_notice else min(lost_s, train_s / 2),
        num_saves=(num_steps - 1) // every_steps if every_steps else 0, has_last=spec.store.checkpoint_at_end,
    )


def _interval(
    spec: RunSpec, pause_s: float, write_s: float, step_s: float, failures: Failures
) -> tuple[int, str]:
    best = steps_between_saves(pause_s, write_s, step_s, failures.mtbf_s, failures.grace_s)
    every = spec.store.checkpoint_every
    if every == "auto":
        return best.every_steps, best.why
    if every == 0:
        return 0, f"store.checkpoint_every = 0 saves nothing before the end; best would be {best.why}"
    return every, f"store.checkpoint_every = {every}; best would be {best.why}"


def _dense_bytes(spec: RunSpec) -> float:
    return layers_of(spec.model).num_values * (4 + DENSE_STATE_BYTES[spec.train.dense_optimizer])
