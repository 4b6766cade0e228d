"""The lease of a run's directory: acquired before anything in it is looked at, released when the run ends."""

import os
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace

from embark.errors import RunInUse, UserError
from embark.events import Event, Sink
from embark.run.signals import StopSignals, stopped_by
from embark.spec import RunSpec
from embark.store import RunDir, first_free_run, run_uri
from embark.store.atomic_file import make_directory
from embark.store.lease import MAX_TTL_S, TTL_S, acquire

TTL = "EMBARK_LEASE_S"  # How long a process on another machine that gives no sign of life is waited for.


@dataclass(frozen=True, slots=True)
class Opening:
    """What opening a run needs besides the spec."""

    signals: StopSignals
    view: Sequence[Sink]
    at_end: ExitStack

    def tell(self, text: str) -> None:
        for sink in self.view:
            sink.emit(Event("note", {"level": "info", "text": text}))

    def pause(self, seconds: float) -> None:
        time.sleep(seconds)
        if name := self.signals.look():
            raise stopped_by(name, f"stopped by {name} while it waited for another process")


def hold_run(spec: RunSpec, opening: Opening, *, fresh: bool) -> RunDir:
    """The run's directory with its lease; with `fresh`, the first that no start has ever held."""
    root, ttl_s = spec.store.root, lease_ttl_s(spec)
    while True:
        run_dir = first_free_run(root, spec.name) if fresh else RunDir(run_uri(root, spec.name))
        try:
            make_directory(run_dir.path)
        except OSError as error:
            raise UserError(f"{run_dir.path}: {error.strerror}",
                            fix="set store.root to a writable directory") from error
        with suppress(*([RunInUse] if fresh else [])):  # another start has made the same directory just now
            lease = acquire(run_dir.store, ttl_s, opening.tell, pause=opening.pause)
            if not fresh or lease.token == 1:
                opening.at_end.callback(lease.release)
                return replace(run_dir, lease=lease, attempt=lease.token, is_fresh=fresh)
            lease.release()


def lease_ttl_s(spec: RunSpec) -> float:
    """Half of what the other ranks wait for the first at most: it may have to wait for the lease to expire."""
    text = os.environ.get(TTL, "")
    try:
        seconds = float(text) if text else TTL_S
    except ValueError:
        seconds = 0.0
    if not 0 < seconds <= MAX_TTL_S:
        raise UserError(f"the environment's {TTL} is {text!r}", fix=f"a number of seconds up to {MAX_TTL_S:.0f}")
    return min(seconds, spec.place.timeout_s / 2)
