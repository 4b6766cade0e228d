"""What is measured: the metrics of `metrics.toml`, each with its unit, meaning and place in events."""

import tomllib
from dataclasses import dataclass
from importlib.resources import files
from typing import Literal

Kind = Literal["gauge", "counter"]


@dataclass(frozen=True, slots=True)
class Metric:
    """One measured quantity, named as it stands in events and in TensorBoard."""

    name: str
    label: str
    """What people read."""
    meaning: str
    paths: tuple[str, ...]
    """Where events have it: `step.loss` is the value `loss` of `step` events. `ranks.systems[host].gpus[gpu].power_w`
    goes through lists or maps whose entries are distinguished by the labels in brackets. `#save` counts events."""
    group: str
    """The heading it is shown under."""
    unit: str = ""
    """Empty for a plain number."""
    better: Literal["up", "down"] | None = None
    """`None` where neither is."""
    kind: Kind = "gauge"
    """A counter only grows."""

    @property
    def labels(self) -> tuple[str, ...]:
        """What distinguishes its several values in one run; `split` is `train` or `eval`."""
        inner = tuple(part.partition("]")[0] for part in self.paths[0].split("[")[1:])
        return ("split", *inner) if self.has_splits else inner

    @property
    def has_splits(self) -> bool:
        return {path.partition(".")[0] for path in self.paths} >= {"step", "eval"}


LEARNING, PACE, STEP, MACHINE, GPU, SAFETY, RUN = (
    "Learning", "Pace", "Where a step's time goes", "Machines", "GPUs", "Checkpoints and interruptions", "The run",
)
GROUPS = (LEARNING, PACE, STEP, MACHINE, GPU, SAFETY, RUN)


METRICS = tuple(
    Metric(**{**row, "paths": tuple(row["paths"])})
    for row in tomllib.loads(files("embark.events").joinpath("metrics.toml").read_text(encoding="utf-8"))["metric"]
)
_BY_NAME = {metric.name: metric for metric in METRICS}


def find(name: str) -> Metric | None:
    """The metric of this name; `None` for a value that is not one, such as `step` or `path`."""
    return _BY_NAME.get(name)


def metric(name: str) -> Metric:
    """The metric of this name, which must exist."""
    return _BY_NAME[name]
