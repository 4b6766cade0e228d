"""What every backend offers to `embark launch`, `status`, `logs` and `cancel`, and what they have in common."""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator

from embark.errors import Interrupted
from embark.launch.backend import CancelResult, LaunchRequest, LogLine, Notify, RunEvent, RunHandle, Status
from embark.launch.http import API_RETRY
from embark.launch.shell import Shell
from embark.spec import RunSpec
from embark.store.retry_policy import RetryPolicy


class Backend(ABC):
    """One platform that runs can be launched on. `status`, `logs` and `events` only read."""

    can_recover = False
    """Lost machines are re-created by `recover`; else the platform does it, or there is nothing to re-create."""
    poll_s = 5.0

    def __init__(self, shell: Shell, *, notify: Notify, retry: RetryPolicy | None = None, context: str = "") -> None:
        """`context`: of kubectl, for a run that is launched; empty: the current one."""
        self._shell = shell
        self._notify = notify
        self._retry = retry or API_RETRY
        self._context = context

    @abstractmethod
    def handle_of(self, spec: RunSpec) -> RunHandle:
        """What the run will be found by. Refuses what cannot be rendered."""

    @abstractmethod
    def check(self, request: LaunchRequest) -> None:
        """Raises where it cannot be launched; changes nothing."""

    @abstractmethod
    def submit(self, request: LaunchRequest) -> None: ...

    @abstractmethod
    def status(self, handle: RunHandle) -> Status: ...

    @abstractmethod
    def logs(self, handle: RunHandle, *, follow: bool = False) -> Iterator[LogLine]:
        """All replicas' lines, merged by time. With `follow`, until the run ends."""

    @abstractmethod
    def cancel(self, handle: RunHandle) -> CancelResult:
        """Ends it after a last checkpoint. Of a run that is not there, what remains."""

    def events(self, handle: RunHandle) -> list[RunEvent]:
        """None where the platform has none: the run's own are in its directory."""
        return []

    def recover(self, handle: RunHandle) -> None:  # noqa: B027 - most platforms do it themselves
        """Re-creates lost machines, where `can_recover`."""

    def _wait(self, handle: RunHandle, has_ended: Callable[[], bool], limit_s: float) -> bool:
        """Until a run that was told to end has done so. False: not within the limit."""
        until_s = time.monotonic() + limit_s
        try:
            while not self._shell.is_dry and not has_ended():
                if time.monotonic() > until_s:
                    return False
                time.sleep(min(self.poll_s, 1.0))
        except KeyboardInterrupt:
            raise Interrupted(f"stopped waiting; {handle.name} was told to end and is ending",
                              fix=f"embark cancel {handle.name} again removes the rest") from None
        return True
