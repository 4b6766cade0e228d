"""One rehearsal from its pods to its verdict, whatever they do: train, serve or follow a stream. Nothing is left of
it."""

import shutil
import signal
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import field, replace
from pathlib import Path
from tempfile import mkdtemp

from embark.errors import Interrupted
from embark.kubernetes.failure_policies import PodEnd
from embark.kubernetes.pods import Names
from embark.lint.rule import Finding
from embark.values import frozen
from .controller import Observer, Progress
from .downscale import Change
from .processes import Processes
from .verdict import Verdict

_STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@frozen
class RehearsalReport:
    """A rehearsal that is over."""

    kind: str
    name: str
    pods: tuple[str, ...]
    verdict: Verdict
    lint: tuple[Finding, ...]
    changes: tuple[Change, ...]  # Differences from the cluster.
    finish: str = ""  # The job `succeeded`, `failed` or ran `too long`; empty if no pod was made.
    reason: str = ""
    progress: Progress = field(default_factory=Progress)
    ends: tuple[PodEnd, ...] = ()
    elapsed_s: float = 0.0
    num_answered: int = 0  # Requests to servers.
    num_retried: int = 0
    num_failed: int = 0


@frozen
class Prepared(ABC):
    """Pods that fit this machine, and how to rehearse them."""

    kind: str
    name: str
    title: str
    names: Names  # The DNS names that lead to the pods.
    changes: tuple[Change, ...]
    findings: tuple[Finding, ...]  # Findings of the linter.

    @property
    def lint(self) -> tuple[Finding, ...]:
        """The linter's errors: expect to see them happen."""
        return tuple(one for one in self.findings if one.level == "error")

    @abstractmethod
    def run_pods(self, processes: Processes, observer: Observer, limit_s: float) -> RehearsalReport:
        """Run the pods until there is a verdict, at most `limit_s`."""

    def report(self, pods: tuple[str, ...], verdict: Verdict, **values: object) -> RehearsalReport:
        return RehearsalReport(kind=self.kind, name=self.name, pods=pods, verdict=verdict, lint=self.lint,
                               changes=self.changes, **values)  # type: ignore[arg-type]


def rehearse(
    prepared: Prepared, observer: Observer, *, limit_s: float = 600.0, env: Mapping[str, str] | None = None
) -> RehearsalReport:
    """Run it, with `env` in all pods. Whatever ends it, Ctrl-C too, its processes and folders are removed."""
    stops: list[int] = []

    def check() -> None:
        if stops:
            raise Interrupted(f"stopped by {signal.Signals(stops[0]).name}")

    def stop(number: int, _: object) -> None:
        # An error from here could leave a queue's lock held, so the first signal waits until the observer is asked.
        check()
        stops.append(number)

    before = {number: signal.signal(number, stop) for number in _STOPS}
    # Ray's sockets lie in it, and the path of a socket has at most 107 characters.
    root = Path(mkdtemp(prefix="embark-rehearse-", dir="/tmp" if prepared.kind == "RayJob" else None))
    processes = Processes(root, prepared.names, env)
    try:
        return prepared.run_pods(processes, replace(observer, check=check), limit_s)
    finally:
        for number in _STOPS:  # a second one does not come between
            signal.signal(number, signal.SIG_IGN)
        processes.close()
        shutil.rmtree(root, ignore_errors=True)
        for number, handler in before.items():
            signal.signal(number, handler)
