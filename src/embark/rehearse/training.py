"""The rehearsal of a job that trains: ranks meet, train, save and, after a fault, resume."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

from embark.errors import UserError
from embark.formatting import pluralize
from embark.kubernetes.failure_policies import FailurePolicy
from embark.kubernetes.objects import Objects
from embark.lint.check import lint_texts
from embark.values import frozen
from .controller import RESTART_S, Controller, EventReader, Fault, FaultKind, Observer, read_faults
from .downscale import MAX_ROWS, SAMPLE, Change, RehearsedRun, downscale, downscale_pods
from .manifest import find_training_job
from .processes import CHANGES, Processes, Start
from .rehearsal import Prepared, RehearsalReport
from .verdict import Case, judge_outcome, refused
from .workload import INSTALL_RAY, NO_RAY, Workload, make_workload


@frozen
class PreparedTraining(Prepared):
    """A job that can be rehearsed."""

    workload: Workload
    policy: FailurePolicy
    run: RehearsedRun | None  # The run that they train, if it is one of Embark's.
    faults: tuple[Fault, ...]
    num_processes: int

    def run_pods(self, processes: Processes, observer: Observer, limit_s: float) -> RehearsalReport:
        names = tuple(pod.name for pod in self.workload.pods)
        if self.workload.refusal is not None:
            return self.report(names, refused(self.workload, self.workload.refusal))
        if self.kind == "RayJob" and find_spec("ray") is None:
            raise UserError(NO_RAY, INSTALL_RAY)
        self._write_sample(processes)
        outcome = Controller(self.workload, self.policy, processes, EventReader(self._run_folder(processes)), observer,
                             faults=self.faults, limit_s=limit_s).run()
        verdict = judge_outcome(Case(self.workload, outcome, self.run, self.num_processes, self.findings))
        return self.report(names, verdict, finish=outcome.finish, reason=outcome.reason, progress=outcome.progress,
                           ends=outcome.ends, elapsed_s=outcome.elapsed_s)

    def _write_sample(self, processes: Processes) -> None:
        """Write the sample of the run's data where all pods see it."""
        if self.run is None or self.run.sample is None:
            return
        from embark.data.sample import write_sample

        folder = processes.find(SAMPLE, Start(self.workload.pods[0], 0, 0))
        assert folder is not None, "every pod has the folder that stands for object stores"
        write_sample(self.run.sample, folder, max_rows=MAX_ROWS)

    def _run_folder(self, processes: Processes) -> Path | None:
        """Return the folder of this machine in which the run's events will be."""
        if self.run is None:
            return None
        first, folder = min(self.workload.trainers, key=lambda pod: pod.index), self.run.folder
        if not folder.startswith("/"):
            folder = f"{first.workdir or '/'}/{folder}"
        return processes.find(folder, Start(first, 0, 0))


def prepare_training(
    texts: Mapping[str, str], objects: Objects, *, where: str = "", num_processes: int = 2, num_steps: int = 100,
    faults: Mapping[FaultKind, Sequence[str]] | None = None
) -> PreparedTraining:
    """Turn manifests into pods that fit this machine. `faults` has the values of each fault's flag."""
    job = find_training_job(objects, where)
    real, _ = make_workload(job, objects)
    small = downscale(job, objects, num_processes=num_processes, num_pods=max(1, len(real.trainers)),
                      num_steps=num_steps)
    workload, policy = make_workload(small.job, small.objects)
    changes = list(small.changes)
    pods = downscale_pods(workload.pods, changes)
    changes += [Change("restart delay", "10 s, doubled each time", f"{RESTART_S:g} s"), *CHANGES]
    read = [fault for kind, words in (faults or {}).items() for fault in read_faults(kind, words, max(1, len(pods)))]
    title = (f"{workload.kind} {workload.name}: {pluralize(len(pods), 'pod')} of "
             f"{num_processes} {'process' if num_processes == 1 else 'processes'}")
    return PreparedTraining(
        kind=workload.kind, name=workload.name, title=title, names=workload.names,
        workload=replace(workload, pods=pods), policy=policy, run=small.run,
        changes=tuple(dict.fromkeys(changes)), faults=tuple(read), num_processes=num_processes,
        findings=tuple(lint_texts(dict(texts))))
