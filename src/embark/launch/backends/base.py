"""What the backends have in common."""

import time
from collections.abc import Callable

from embark.errors import Interrupted
from embark.launch.backend import Notify, RunHandle
from embark.launch.http import API_RETRY
from embark.launch.shell import Shell
from embark.store.retry_policy import RetryPolicy


class BaseBackend:
    """A backend whose platform replaces lost machines itself, or has none to replace."""

    can_recover = False
    poll_s = 5.0

    def __init__(self, shell: Shell, *, notify: Notify, retry: RetryPolicy | None = None, context: str = "") -> None:
        """`context`: of kubectl, for a run that is launched; empty: the current one."""
        self._shell = shell
        self._notify = notify
        self._retry = retry or API_RETRY
        self._context = context

    def recover(self, handle: RunHandle) -> None:
        """Nothing to do."""

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
