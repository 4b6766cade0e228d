"""The verbs about where a run goes: what it takes there, the files to hand over, and what is wrong with such files."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from embark.cli.console import Console
from embark.cli.options import Flag, Settings, Spec


def plan(
    spec: Spec,
    /,
    *,
    set_: Settings = (),
    across: Flag = False,
    by: Literal["dollars", "hours"] | None = None,
    deadline: float | None = None,
    budget: float | None = None,
    cloud: str = "",
    region: str = "",
    spot: Annotated[bool | None, Parameter(negative="--on-demand", show_default=False)] = None,
    max_nodes: int = 16,
    samples: int | None = None,
    picture: Path | None = None,
    exact: Flag = False,
    tpu_compile: str = "",
    console: Console = Console(),
) -> int:
    """Say what a run will take before it is paid for: what fits, step time, hours, dollars. Needs no torch, no network.

    On place.machine and place.nodes; where no machine is named, on all of the catalog. Exit code 1 if it does not fit.

    Parameters
    ----------
    across
        Rank every machine of the catalog in every useful number, whatever place.machine is.
    by
        With --across: cheapest first, or fastest first. With a budget alone: fastest first.
    deadline
        Hours the whole run may take.
    budget
        Dollars the whole run may cost.
    cloud
        aws, azure or gcp: no other cloud's machines.
    region
        A region's prices; else wherever the machine is cheapest.
    spot
        Pay for spot machines, or on demand; else as place.spot says.
    max_nodes
        The most machines of a kind that are tried.
    samples
        Samples in an epoch, where the data is not here to be counted.
    picture
        With --across: draw cost against time into this SVG file.
    exact
        Let TorchRec's own planner place the tables. Needs torch.
    tpu_compile
        Instead, compile the step for these chips, such as v5e:2x4, and show the memory that the compiler plans. Needs
        jax[tpu], but no TPU.
    """
    from embark.cli.plan_output import Asked, plan_run
    from embark.spec import load_spec

    if tpu_compile:
        from embark.cli.plan_tpu import plan_compiled

        return plan_compiled(console, load_spec(spec, set_), tpu_compile)
    asked = Asked(across, by or "", deadline, budget, cloud, region, spot, max_nodes, picture, exact, samples)
    return plan_run(console, load_spec(spec, set_), asked)
