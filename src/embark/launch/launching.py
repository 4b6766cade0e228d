"""Launch, recover and cancel a run."""

import time
from dataclasses import asdict, field, replace

from embark.data import resolve_from_data, resolve_if_readable
from embark.errors import EmbarkError, Interrupted, UserError
from embark.formatting import format_usd, to_one_line
from embark.render.serving import SERVE_TARGETS
from embark.render.targets.slurm import Search, search_job
from embark.spec import RunSpec, to_toml
from embark.store import BRIEF_RETRY, CheckpointStore, open_store
from embark.values import frozen
from .backend import (
    CancelResult,
    LaunchBackend,
    LaunchRequest,
    Resource,
    RunHandle,
    Status,
    backend_for,
    backend_of,
)
from .backends.local import Local
from .backends.slurm import Slurm
from .costs import LaunchEstimate, estimate_launch, estimate_server
from .run_registry import (
    RunRecord,
    delete_record,
    launch_lock,
    location_hash,
    lookup_run,
    record_path,
    save_record,
)
from .shell import Notify, Shell

RECOVER_POLL_S = 15.0


@frozen
class PreparedLaunch:
    """A run that was checked and may be launched."""

    request: LaunchRequest
    backend: LaunchBackend = field(repr=False)
    estimate: LaunchEstimate | None  # None if the launch costs nothing.
    prepared_s: float = field(default_factory=time.time)  # A launch that came after it was not seen.

    @property
    def handle(self) -> RunHandle:
        return self.request.handle


@frozen
class LaunchResult(RunHandle):
    """A run that was launched or, on a dry run, the commands that would have launched it."""

    estimate: LaunchEstimate | None = None
    state: str = "submitted"  # The final state of the run, with `--supervise`.
    reason: str = ""
    commands: tuple[tuple[str, ...], ...] = ()


def prepare_launch(spec: RunSpec, shell: Shell, notify: Notify, *, context: str = "") -> PreparedLaunch:
    """Check everything and create nothing. Raises if the run does not fit or cannot be launched."""
    try:
        backend = backend_for(spec, shell, notify, context=context)
        if isinstance(backend, Local):
            spec = resolve_from_data(spec)
        else:
            spec, unread = resolve_if_readable(spec)
            if unread:
                notify(unread)
        estimate = None
        if spec.place.target in SERVE_TARGETS:
            estimate = estimate_server(spec)
        elif spec.place.machine or spec.place.cloud:
            estimate = estimate_launch(spec)
        if estimate is not None and not estimate.fits:
            raise UserError(estimate.verdict, "nothing was launched. embark plan shows what fits; embark render "
                                                  "writes the files in spite of it")
        request, prepared_s = LaunchRequest(spec, backend.handle_of(spec)), time.time()
        backend.check(request)
    except KeyboardInterrupt:
        raise Interrupted("stopped by Ctrl-C; nothing was created") from None
    return PreparedLaunch(request, backend, estimate, prepared_s)


def prepare_search(search: Search, shell: Shell, notify: Notify) -> PreparedLaunch:
    """Check everything and create nothing, as `prepare_launch` does, for the array of a search on Slurm."""
    backend, spec = Slurm(shell, notify=notify), search_job(search.spec)
    backend.search = search
    handle = backend.handle_of(spec)
    request, usd = LaunchRequest(spec, handle), handle.usd_per_hour
    estimate = LaunchEstimate(True, f"{search.num_jobs} jobs of one node", f"{format_usd(usd)} an hour", usd) \
        if usd is not None else None
    prepared_s = time.time()
    backend.check(request)
    return PreparedLaunch(request, backend, estimate, prepared_s)


def submit_launch(launch: PreparedLaunch) -> RunRecord:
    """Launch the run. Whatever interrupts it, the error lists what may exist by then and how to remove it."""
    with launch_lock(launch.handle):
        before = lookup_run(f"{launch.handle.name}@{location_hash(launch.handle)}")
        if before is not None and before.submitted_s > launch.prepared_s:  # another command was faster
            launch.backend.check(launch.request)
        return _submit(launch)


def _submit(launch: PreparedLaunch) -> RunRecord:
    run = RunRecord(launch.handle, to_toml(launch.request.spec), time.time(), is_submitted=False,
                    path=record_path(launch.handle))
    created: list[Resource] = []
    try:
        save_record(run)
        launch.backend.submit(replace(launch.request, record=created.append))
        return save_record(replace(run, is_submitted=True))
    except KeyboardInterrupt:
        if not created:
            delete_record(run)
            raise Interrupted("stopped by Ctrl-C; nothing was created") from None
        raise Interrupted(f"stopped by Ctrl-C; {_may_exist(created)}", _removal(created)) from None
    except EmbarkError as error:
        if not created:
            delete_record(run)
            raise
        fix = "; ".join(part for part in (error.fix, f"to remove: {_removal(created)}") if part)
        raise type(error)(f"{error.what}; {_may_exist(created)}", fix=fix) from error


def launch_result(launch: PreparedLaunch, *, status: Status | None = None,
                  commands: tuple[tuple[str, ...], ...] = ()) -> LaunchResult:
    return LaunchResult(**asdict(launch.handle), estimate=launch.estimate, commands=commands,
                        state=status.state if status else "dry run" if commands else "submitted",
                        reason=status.reason if status else "")


def find_active(name: str, shell: Shell, notify: Notify) -> RunRecord | None:
    """Return a launched run of that name that has not ended, so that its supervision can be resumed."""
    run = lookup_run(name)
    return None if run is None or backend_of(run.handle, shell, notify).status(run.handle).has_ended else run


def recover_until_ended(run: RunRecord, shell: Shell, notify: Notify, *, poll_s: float = RECOVER_POLL_S) -> Status:
    """Re-create machines that the run loses, until it ends. Ctrl-C ends the supervision and not the run."""
    handle = run.handle
    backend = backend_of(handle, shell, notify)
    said = ""
    try:
        while True:
            try:
                status = backend.status(handle)
                if status.has_ended or not backend.can_recover:
                    return status
                now = f"{handle.name}: {status.state}" + (f": {status.reason}" if status.reason else "")
                if now != said:
                    notify(now)
                    said = now
                if status.is_recoverable:
                    backend.recover(handle)
            except EmbarkError as error:  # a cloud without capacity now may have some later
                notify(f"{handle.name}: {error.what}; trying again")
            time.sleep(poll_s)
    except KeyboardInterrupt:
        raise Interrupted(
            f"stopped supervising {handle.name}, which keeps running",
            f"embark launch {handle.name} --supervise resumes; embark cancel {handle.name} ends the run"
        ) from None


def cancel_run(run: RunRecord, shell: Shell, notify: Notify) -> CancelResult:
    """End a run after a last checkpoint. A run that does not exist any more is removed from the registry."""
    result = backend_of(run.handle, shell, notify).cancel(run.handle)
    if not shell.is_dry and result.is_complete:
        if result.removed:
            save_record(replace(run, is_submitted=True, is_cancelled=True))
        else:
            delete_record(run)
    return replace(result, name=run.handle.name, title=run.handle.title, last_checkpoint=_last_checkpoint(run.handle))


def _may_exist(created: list[Resource]) -> str:
    return "may exist by now: " + ", ".join(resource.what for resource in created)


def _removal(created: list[Resource]) -> str:
    return ", then ".join(dict.fromkeys(resource.remove for resource in reversed(created)))


def _last_checkpoint(handle: RunHandle) -> str:
    try:
        store = CheckpointStore(open_store(f"{handle.run_uri}/checkpoints", BRIEF_RETRY))
        return max((checkpoint.name for checkpoint in store.committed()), default="")
    except (EmbarkError, ImportError):
        return ""


def launch_title(handle: RunHandle) -> str:
    """Return one line for a person: the run, and where it is launched."""
    where = f" in {handle.where['context']}" if handle.where.get("context") else ""
    return f"{to_one_line(handle.title or handle.name)}{where}"
