"""One rehearsal from its manifest to its verdict; it leaves nothing behind unless asked to."""

import shutil
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from tempfile import mkdtemp
from typing import Literal

from embark.errors import Interrupted, UserError
from embark.kubernetes.failure_policies import FailurePolicy, PodEnd
from embark.launch.image import usable
from embark.launch.shell import Shell
from embark.lint.check import lint_texts
from embark.lint.rule import Finding
from embark.rehearse.controller import (
    RESTART_S,
    Controller,
    EventReader,
    Fault,
    FaultKind,
    Observer,
    Progress,
    read_faults,
)
from embark.rehearse.downscale import MAX_ROWS, SAMPLE, Change, RehearsedRun, downscale, downscale_pods
from embark.rehearse.engines import ENGINES, Containers, Engine, Folders, Processes, Start, has_image
from embark.rehearse.manifest import MANIFEST_SUFFIXES, find_training_job, manifest_texts, read_texts
from embark.rehearse.verdict import Case, Verdict, judge_outcome, refused
from embark.rehearse.workload import INSTALL_RAY, NO_RAY, Workload, make_workload

_STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
EngineName = Literal["auto", "podman", "docker", "processes"]
TARGETS = ("job", "jobset", "trainjob", "pytorchjob", "ray", "follow", "serve")


@dataclass(frozen=True, slots=True)
class RehearsalOptions:
    """Options of a rehearsal."""

    num_processes: int = 2
    num_steps: int = 100
    engine: EngineName = "auto"
    image: str = ""
    limit_s: float = 600.0
    faults: tuple[tuple[FaultKind, tuple[str, ...]], ...] = ()  # Kind of fault to the values of its flag.
    keep: bool = False


@dataclass(frozen=True, slots=True)
class PreparedRehearsal:
    """A rehearsal that can begin."""

    workload: Workload
    policy: FailurePolicy
    run: RehearsedRun | None
    changes: tuple[Change, ...]
    faults: tuple[Fault, ...]
    findings: tuple[Finding, ...]  # Findings of the linter.

    @property
    def lint(self) -> tuple[Finding, ...]:
        """The linter's errors: expect to see them happen."""
        return tuple(one for one in self.findings if one.level == "error")


@dataclass(frozen=True, slots=True)
class RehearsalReport:
    """A rehearsal that is over."""

    kind: str
    name: str
    pods: tuple[str, ...]
    engine: str
    verdict: Verdict
    lint: tuple[Finding, ...]
    changes: tuple[Change, ...] = ()  # Differences from the cluster.
    finish: str = ""  # The job `succeeded`, `failed` or ran `too long`; empty if no pod was made.
    reason: str = ""
    progress: Progress = field(default_factory=Progress)
    ends: tuple[PodEnd, ...] = ()
    elapsed_s: float = 0.0
    left_behind: str = ""  # Files that `keep` left, and how to remove them.


def load_manifests(
    spec: str, sets: Sequence[str], num_nodes: int | None, files: Path | None
) -> tuple[dict[str, str], str]:
    """Return the manifests' texts by path, from files or as `embark render` would write them; and a name for them."""
    path = files or Path(spec)
    if path.is_dir() or (path.suffix in MANIFEST_SUFFIXES and path.is_file()):
        if num_nodes is not None or (sets and files is None):
            raise UserError("--nodes and --set change a spec, and these are manifests",
                            fix="embark rehearse SPEC --nodes …, or render it again")
        return manifest_texts(path), str(path)
    if files is not None or path.suffix in MANIFEST_SUFFIXES:
        raise UserError(f"{path}: no such file", fix="embark render SPEC --out FOLDER writes it")
    from embark.catalog import load_catalog
    from embark.lint.rendered import resolve_spec
    from embark.render.job import make_job
    from embark.render.render import own_files
    from embark.spec import load_spec

    sets = [*sets, *([f"place.nodes={num_nodes}"] if num_nodes is not None else [])]
    job = make_job(resolve_spec(load_spec(spec, sets))[0], load_catalog())
    if job.spec.place.target not in TARGETS:
        raise UserError(f'place.target = "{job.spec.place.target}" has no pods to rehearse',
                        fix=f"set it to {', '.join(TARGETS)}")
    return {file.path: file.text for file in own_files(job) if file.path.endswith(MANIFEST_SUFFIXES)}, spec


def prepare(texts: Mapping[str, str], where: str, options: RehearsalOptions) -> PreparedRehearsal:
    """Turn manifests into pods that fit this machine."""
    objects = read_texts(texts)
    job = find_training_job(objects, where)
    real, _ = make_workload(job, objects)
    small = downscale(job, objects, num_processes=options.num_processes, num_pods=max(1, len(real.trainers)),
                      num_steps=options.num_steps)
    workload, policy = make_workload(small.job, small.objects)
    changes = list(small.changes)
    pods = downscale_pods(workload.pods, changes)
    changes.append(Change("restart delay", "10 s, doubled each time", f"{RESTART_S:g} s"))
    faults = [fault for kind, words in options.faults for fault in read_faults(kind, words, max(1, len(pods)))]
    return PreparedRehearsal(replace(workload, pods=pods), policy, small.run, tuple(dict.fromkeys(changes)),
                             tuple(faults), tuple(lint_texts(dict(texts))))


def rehearse(prepared: PreparedRehearsal, options: RehearsalOptions, observer: Observer, *,
             on_start: Callable[[Sequence[Change], str], None]) -> RehearsalReport:
    """Run it. `on_start` gets what differs from the cluster, and the engine with the reason, before it begins."""
    workload = prepared.workload
    report = RehearsalReport(workload.kind, workload.name, tuple(pod.name for pod in workload.pods), "none",
                             Verdict(False, ""), prepared.lint)
    if workload.refusal is not None:
        return replace(report, verdict=refused(workload, workload.refusal))
    # Ray's sockets lie in it, and the path of a socket has at most 107 characters.
    root = Path(mkdtemp(prefix="embark-rehearse-", dir="/tmp" if workload.kind == "RayJob" else None))
    root.chmod(0o755)
    engine: Engine | None = None
    left_behind = ""
    stops = StopSignals()
    before = {number: signal.signal(number, stops.handle) for number in _STOPS}
    try:
        engine, why = choose_engine(prepared, options, Folders(root), Shell())
        if any(fault.kind == "cut" for fault in prepared.faults) and not engine.can_cut:
            raise UserError("--cut needs containers: processes share one network",
                            fix="--engine podman or docker: a container has its own network")
        changes = (*prepared.changes, *engine.changes())
        on_start(changes, why)
        engine.begin()
        _write_sample(prepared, engine)
        reader = EventReader(_run_folder(prepared, engine))
        outcome = Controller(workload, prepared.policy, engine, reader, observer, faults=prepared.faults,
                             limit_s=options.limit_s, uninterrupted=stops.deferred).run()
        verdict = judge_outcome(Case(workload, outcome, prepared.run, options.num_processes, prepared.findings))
        left_behind = engine.close(keep=True) if options.keep else ""
        return replace(report, engine=engine.name, verdict=verdict, changes=changes, finish=outcome.finish,
                       reason=outcome.reason, progress=outcome.progress, ends=outcome.ends,
                       elapsed_s=outcome.elapsed_s, left_behind=left_behind)
    except Interrupted as stopped:
        if engine is None or not options.keep:
            raise
        stops.is_over = True
        left_behind = engine.close(keep=True)
        raise Interrupted(f"{stopped.what}; kept: {left_behind}") from None
    finally:  # Ctrl-C and a SIGTERM pass here too, and a second one does not come between
        stops.is_over = True
        if not left_behind:
            if engine is not None and (failed := engine.close(keep=False)):
                observer.note(f"not removed: {failed}")
            shutil.rmtree(root, ignore_errors=True)
        for number, handler in before.items():
            signal.signal(number, handler)


class StopSignals:
    """Handles Ctrl-C and its like at once, after a block that must not be cut in two, or not at all during the
    clean-up."""

    def __init__(self) -> None:
        self.is_over = False
        self._is_deferred = False
        self._pending = 0

    def handle(self, number: int, _: object) -> None:
        if self.is_over:
            return
        self._pending = number
        if not self._is_deferred:
            self._raise()

    @contextmanager
    def deferred(self) -> Iterator[None]:
        self._is_deferred = True
        try:
            yield
        finally:
            self._is_deferred = False
        if self._pending:
            self._raise()

    def _raise(self) -> None:
        name, self._pending = signal.Signals(self._pending).name, 0
        raise Interrupted(f"stopped by {name}")


def choose_engine(prepared: PreparedRehearsal, options: RehearsalOptions, folders: Folders,
                  shell: Shell) -> tuple[Engine, str]:
    """Return the engine, and why it was chosen."""
    names = prepared.workload.names
    if prepared.workload.kind == "RayJob":
        if options.engine not in ("auto", "processes"):
            raise UserError("a RayJob is rehearsed by processes, not in containers", fix="--engine processes")
        if find_spec("ray") is None:
            raise UserError(NO_RAY, fix=INSTALL_RAY)
        return Processes(folders, names), "pods are Ray's own processes on this machine"
    candidates = [options.engine] if options.engine != "auto" else [*ENGINES, "processes"]
    image = options.image or prepared.workload.pods[0].image
    reasons: list[str] = []
    for name in candidates:
        if name == "processes":
            has_limits = any(pod.memory_bytes or pod.cpus for pod in prepared.workload.pods)
            return (Processes(folders, names, has_limits=has_limits),
                    "; ".join([*reasons, "pods are processes of this machine"]))
        if not usable(name, shell):
            if options.engine == name:
                raise UserError(f"{name} is not installed, or does not answer",
                                fix=f"{name} info says why; or --engine processes")
            reasons.append(f"no {name} here")
            continue
        if has_image(name, image, shell):
            return Containers(name, image, folders, names, shell), f"pods are containers of {image}, run by {name}"
        build = f"{name} build -t {image} --build-arg VARIANT=cpu --build-arg FABRIC=none FOLDER"
        if options.engine == name or options.image:
            raise UserError(f"{name} has no image {image}", fix=f"embark render SPEC --out FOLDER; {build}; or --image "
                                                                "one that exists; or --engine processes")
        reasons.append(f"{name} has no image {image} ({build} makes it)")
    raise AssertionError("the last engine is always here")


def _write_sample(prepared: PreparedRehearsal, engine: Engine) -> None:
    """Write the sample of the run's data where all pods see it."""
    if prepared.run is None or prepared.run.sample is None:
        return
    from embark.data.sample import write_sample

    folder = engine.folders.find(SAMPLE, Start(prepared.workload.pods[0], 0, 0))
    assert folder is not None, "every pod has the folder that stands for object stores"
    write_sample(prepared.run.sample, folder, max_rows=MAX_ROWS)


def _run_folder(prepared: PreparedRehearsal, engine: Engine) -> Path | None:
    """Return the folder of this machine in which the run's events will be."""
    if prepared.run is None:
        return None
    first = min(prepared.workload.trainers, key=lambda pod: pod.index)
    folder, start = prepared.run.folder, Start(first, 0, 0)
    if not folder.startswith("/"):
        folder = f"{first.workdir or '/'}/{folder}"
    return engine.folders.find(folder, start)
