"""One rehearsal from its manifest to its verdict; nothing of it is left behind unless asked for."""

from __future__ import annotations

import shutil
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import mkdtemp
from typing import Literal

from embark.errors import Interrupted, UserError
from embark.launch.shell import Shell
from embark.rehearse.containers import ENGINES, Containers, has_image, usable
from embark.rehearse.controller import RESTART_S, Controller, Listener, Outcome
from embark.rehearse.downscale import Change, Run, shrink, shrink_pods
from embark.rehearse.engine import Engine, Folders, Start
from embark.rehearse.failure_policies import Judge
from embark.rehearse.faults import Fault, FaultKind, read_faults
from embark.rehearse.objects import read_texts, the_job
from embark.rehearse.processes import Processes
from embark.rehearse.progress import EventReader
from embark.rehearse.root_cause import Case
from embark.rehearse.verdict import Verdict, judge_outcome, refused
from embark.rehearse.workload import Workload, make_workload

_STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
EngineName = Literal["auto", "podman", "docker", "processes"]


@dataclass(frozen=True, slots=True)
class Asked:
    """What a person asks for."""

    num_processes: int = 2
    num_steps: int = 100
    engine: EngineName = "auto"
    image: str = ""
    limit_s: float = 600.0
    faults: tuple[tuple[FaultKind, tuple[str, ...]], ...] = ()
    """Kind of fault to the words of its flag."""
    keep: bool = False


@dataclass(frozen=True, slots=True)
class Prepared:
    """A rehearsal that can begin."""

    workload: Workload
    judge: Judge
    run: Run | None
    changes: tuple[Change, ...]
    faults: tuple[Fault, ...]


@dataclass(frozen=True, slots=True)
class Rehearsed:
    """A rehearsal that is over."""

    verdict: Verdict
    outcome: Outcome | None
    """None where no pod was made."""
    engine: str
    kept: str = ""
    """What is left, and how to remove it."""


def prepare(texts: Mapping[str, str], where: str, asked: Asked) -> Prepared:
    """From manifests to pods that fit this machine, and what had to be changed for it."""
    objects = read_texts(texts)
    job = the_job(objects, where)
    real, _ = make_workload(job, objects)
    shrunk = shrink(job, objects, num_processes=asked.num_processes, num_pods=max(1, len(real.pods)),
                    num_steps=asked.num_steps)
    workload, judge = make_workload(shrunk.job, shrunk.objects)
    changes = list(shrunk.changes)
    pods = shrink_pods(workload.pods, changes)
    small = Workload(workload.kind, workload.name, pods, workload.services, workload.is_indexed, workload.refusal,
                     workload.deadline_s)
    changes.append(Change("before a pod is made again", "10 s, twice as long each time", f"{RESTART_S:g} s"))
    faults = [fault for kind, words in asked.faults for fault in read_faults(kind, words, max(1, len(pods)))]
    return Prepared(small, judge, shrunk.run, tuple(dict.fromkeys(changes)), tuple(faults))


def rehearse(prepared: Prepared, asked: Asked, listener: Listener, *,
             say: Callable[[Sequence[Change], str], None]) -> Rehearsed:
    """Run it. `say` is told what is not as in the cluster, and which engine was taken and why, before it begins."""
    workload = prepared.workload
    if workload.refusal is not None:
        return Rehearsed(refused(workload, workload.refusal), None, "none")
    root = Path(mkdtemp(prefix="embark-rehearse-"))
    root.chmod(0o755)
    engine: Engine | None = None
    kept = ""
    stops = Stops()
    before = {number: signal.signal(number, stops.come) for number in _STOPS}
    try:
        engine, why = choose_engine(prepared, asked, Folders(root), Shell())
        if any(fault.kind == "cut" for fault in prepared.faults) and not engine.can_cut:
            raise UserError("a process cannot be cut off from the network that all share",
                            fix="--engine podman or docker: a container has a network of its own")
        say([*prepared.changes, *engine.changes()], why)
        engine.begin()
        reader = EventReader(_run_folder(prepared, engine))
        outcome = Controller(workload, prepared.judge, engine, reader, listener, faults=prepared.faults,
                             limit_s=asked.limit_s, held=stops.held).run()
        verdict = judge_outcome(Case(workload, outcome, prepared.run, asked.num_processes))
        kept = engine.close(keep=True) if asked.keep else ""
        return Rehearsed(verdict, outcome, engine.name, kept)
    except Interrupted as stopped:
        if engine is None or not asked.keep:
            raise
        stops.is_over = True
        kept = engine.close(keep=True)
        raise Interrupted(f"{stopped.what}; kept: {kept}") from None
    finally:  # Ctrl-C and a SIGTERM pass here too, and a second one does not come between
        stops.is_over = True
        if not kept:
            if engine is not None:
                engine.close(keep=False)
            shutil.rmtree(root, ignore_errors=True)
        for number, handler in before.items():
            signal.signal(number, handler)


class Stops:
    """Ctrl-C and its like: at once, after what must not be cut in two, or not at all once all is being taken away."""

    def __init__(self) -> None:
        self.is_over = False
        self._is_held = False
        self._came = 0

    def come(self, number: int, _: object) -> None:
        if self.is_over:
            return
        self._came = number
        if not self._is_held:
            self._raise()

    @contextmanager
    def held(self) -> Iterator[None]:
        self._is_held = True
        try:
            yield
        finally:
            self._is_held = False
        if self._came:
            self._raise()

    def _raise(self) -> None:
        name, self._came = signal.Signals(self._came).name, 0
        raise Interrupted(f"stopped by {name}")


def choose_engine(prepared: Prepared, asked: Asked, folders: Folders, shell: Shell) -> tuple[Engine, str]:
    """And why: what a person should know of it."""
    names = prepared.workload.names
    wanted = [asked.engine] if asked.engine != "auto" else [*ENGINES, "processes"]
    image = asked.image or prepared.workload.pods[0].image
    reasons: list[str] = []
    for name in wanted:
        if name == "processes":
            has_limits = any(pod.memory_bytes or pod.cpus for pod in prepared.workload.pods)
            return (Processes(folders, names, has_limits=has_limits),
                    "; ".join([*reasons, "pods are processes of this machine"]))
        if not usable(name, shell):
            if asked.engine == name:
                raise UserError(f"{name} is not here, or does not answer", fix=f"{name} info says why; or "
                                                                               "--engine processes")
            reasons.append(f"no {name} here")
            continue
        if has_image(name, image, shell):
            return Containers(name, image, folders, names, shell), f"pods are containers of {image}, run by {name}"
        build = f"{name} build -t {image} --build-arg VARIANT=cpu --build-arg FABRIC=none FOLDER"
        if asked.engine == name or asked.image:
            raise UserError(f"{name} has no image {image}", fix=f"embark render SPEC --out FOLDER; {build}; or --image "
                                                                "one that is there; or --engine processes")
        reasons.append(f"{name} has no image {image} ({build} makes it)")
    raise AssertionError("the last engine is always here")


def _run_folder(prepared: Prepared, engine: Engine) -> Path | None:
    """Where the run's events will be, on this machine."""
    if prepared.run is None:
        return None
    first = min(prepared.workload.pods, key=lambda pod: pod.index)
    folder, start = prepared.run.folder, Start(first, 0, 0)
    if not folder.startswith("/"):
        folder = f"{first.workdir or '/'}/{folder}"
    return engine.folders.find(folder, start)
