"""The verb that runs a job's own manifest here first."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from embark.cli.console import Console
from embark.cli.options import Flag, Settings

Times = Annotated[tuple[str, ...], Parameter(negative="", show_default=False)]


def rehearse(
    spec: str,
    /,
    *,
    set_: Settings = (),
    nodes: int | None = None,
    processes: int = 2,
    files: Path | None = None,
    preempt: Times = (),
    kill: Times = (),
    pause: Times = (),
    cut: Times = (),
    engine: Literal["auto", "podman", "docker", "processes"] = "auto",
    image: str = "",
    steps: int = 100,
    limit: str = "10m",
    keep: Flag = False,
    console: Console = Console(),
) -> int:
    """Run the rendered job's own commands here, pods and all, before a GPU is paid for.

    Each pod is a container of the image, or a process group; its controller's restarts and failure policy are the
    manifest's own. Exit code 1 unless all ranks met, trained, saved and, after a fault, went on.

    Parameters
    ----------
    spec
        A spec; or a folder that embark render wrote; or any manifest with a Job, JobSet, TrainJob, PyTorchJob or Pod.
    nodes
        Pods, instead of place.nodes.
    processes
        Ranks in each pod, instead of one for each accelerator.
    files
        Take the manifests of this folder, which embark render wrote from SPEC.
    preempt
        1@30s takes pod 1 away after 30 s: SIGTERM, then SIGKILL after its grace; 1@step20 at step 20. Many times.
    kill
        1@30s ends pod 1 with no notice, as when its machine dies.
    pause
        1@30s+10s lets pod 1 stand still for 10 s.
    cut
        1@30s+10s cuts pod 1 off from the network for 10 s. Needs containers.
    engine
        What runs the pods; auto takes podman, docker or processes, whichever is here first.
    image
        The image, instead of the manifest's.
    steps
        Steps to train.
    limit
        When it must be over: 10m, 90s.
    keep
        Leave containers and folders as they are, and say where.
    """
    from embark.cli.rehearse_output import Words, rehearse_words

    return rehearse_words(console, Words(
        spec, tuple(set_), nodes, processes, files, engine, image, steps, limit, keep,
        faults=(("preempt", preempt), ("kill", kill), ("pause", pause), ("cut", cut)),
    ))
