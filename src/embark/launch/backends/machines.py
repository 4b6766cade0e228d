"""Machines that a cloud's command line creates for one run and that are reached by ssh: shared by VMs and TPUs."""

import json
import math
import shutil
import time
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property

from embark.catalog import load_catalog
from embark.errors import EmbarkError, Interrupted, UserError
from embark.formatting import format_duration, pluralize, to_one_line
from embark.launch.backend import (
    CancelResult,
    DamagedRecord,
    LaunchBackend,
    LaunchRequest,
    ReadLines,
    Resource,
    RunHandle,
    Status,
    read_logs,
)
from embark.launch.run_registry import run_outcome
from embark.launch.supervisor_client import Host, LogPosition, SupervisorClient, names_of
from embark.render.job import Job, make_job
from embark.render.targets.vm_node import OFF_DELAY_S
from embark.spec import load_spec, to_toml
from embark.store import SPEC, write_atomic
from embark.values import frozen

RUN_FOLDER = "/var/lib/embark-run"  # The folder on the machine with the job's files and the log.
SUBMITTED = "submitted.json"
STOP_MARGIN_S = 20.0  # Beyond the grace period, since the end of the last rank is noticed by polling.


def end_later() -> tuple[str, ...]:
    """Return the command that ends a machine some time after its run, by the `off.sh` beside the job."""
    return ("systemd-run", "--unit=embark-off", f"--on-active={OFF_DELAY_S}", f"{RUN_FOLDER}/off.sh")


@frozen
class Existing:
    """Machines that `cancel` ends."""

    hosts: Sequence[Host]  # Machines whose ranks can be stopped.
    names: tuple[str, ...]
    delete: Callable[[], object]
    remains: tuple[Resource, ...] = ()


class MachinesBackend(LaunchBackend):
    """A run's machines. A folder of this user identifies them until `cancel`."""

    can_recover = True
    poll_s = 5.0

    @cached_property
    def _ssh(self) -> SupervisorClient:
        return SupervisorClient(self._shell, notify=self._notify)

    @abstractmethod
    def _submit(self, request: LaunchRequest, job: Job) -> None: ...

    @abstractmethod
    def _look(self, handle: RunHandle, job: Job) -> tuple[list[Host], Status]:
        """Return the machines whose logs can be read, and the status."""

    @abstractmethod
    def _recreate(self, handle: RunHandle, job: Job) -> None: ...

    @abstractmethod
    def _existing(self, handle: RunHandle, job: Job) -> Existing | None: ...

    def check(self, request: LaunchRequest) -> None:
        root = request.spec.store.root
        if "://" not in root:
            raise UserError(f"store.root = {root}: checkpoints there would be deleted with the machine",
                            "--set store.root= to a bucket: s3://…, az://… or gs://…")

    def submit(self, request: LaunchRequest) -> None:
        folder = request.handle.folder
        if not self._shell.is_dry:
            (folder / SUBMITTED).unlink(missing_ok=True)
            write_atomic(folder / SPEC, to_toml(request.spec, only_set=True))
        self._submit(request, make_job(request.spec, load_catalog()))
        if not self._shell.is_dry:
            write_atomic(folder / SUBMITTED, json.dumps({"time_s": time.time()}))

    def status(self, handle: RunHandle) -> Status:
        return self._inspect(handle)[1]

    def log_reader(self, handle: RunHandle) -> ReadLines:
        positions: dict[int, LogPosition] = {}
        return lambda: read_logs(self._ssh.log_sources(self._inspect(handle)[0], positions))

    def recover(self, handle: RunHandle) -> None:
        self._recreate(handle, self._job(handle))

    def cancel(self, handle: RunHandle) -> CancelResult:
        """Stop the ranks after a last checkpoint, then delete the machines."""
        existing = self._existing(handle, self._job(handle)) if self._is_known(handle) else None
        if existing is not None:
            self._stop_ranks(handle, existing.hosts)
        if not self._shell.is_dry:  # before anything is deleted: a supervisor that looks now re-creates nothing
            (handle.folder / SUBMITTED).unlink(missing_ok=True)
        if existing is not None:
            existing.delete()
        if not self._shell.is_dry:
            shutil.rmtree(handle.folder, ignore_errors=True)
        names, remains = (existing.names, existing.remains) if existing else ((), ())
        return CancelResult(names, (*remains, handle.checkpoints))

    def _inspect(self, handle: RunHandle) -> tuple[list[Host], Status]:
        if not self._is_known(handle):
            return [], Status("gone", f"the machines of {handle.name} were deleted, or never created",
                              "embark launch creates them")
        return self._look(handle, self._job(handle))

    def _lost(self, handle: RunHandle, reason: str, status: Status, *, is_gone: bool, may_recreate: bool) -> Status:
        """Return the status of a run whose machines or ranks are lost: whether it had finished, or else what brings it
        back.

        `is_gone` means that a machine no longer exists, so that only the run's events tell.
        """
        since_s = submitted_s(handle)
        if since_s is None:
            return status.become("pending", "its launch was interrupted before all machines had the run",
                                 f"embark cancel {handle.name}, then launch again")
        outcome = run_outcome(handle.run_uri, since_s) if is_gone else ""
        if outcome in ("done", "budget"):
            return status.become("succeeded", f"{reason}, after it had finished ({outcome})",
                                 f"embark cancel {handle.name}")
        if not may_recreate:
            return status.become("failed", reason, f"embark cancel {handle.name} and embark launch: it resumes from "
                                                   f"the last checkpoint in {handle.run_uri}")
        if outcome is None:
            return status.become("lost", f"{reason}; its events cannot be read from here, so whether it had finished "
                                         "is unknown", "pip install 'embark-rec[cloud]', or launch it again")
        return replace(status, state="lost", reason=reason, is_recoverable=True,
                       fix=f"embark launch {handle.name} --supervise re-creates what is lost and resumes the run")

    def _stop_ranks(self, handle: RunHandle, hosts: Sequence[Host]) -> None:
        if not hosts:
            return
        grace_s, name = handle.where["grace_s"], handle.name
        self._notify(f"stopping the ranks of {pluralize(len(hosts), 'machine')}; each saves a last checkpoint, within "
                     f"{format_duration(grace_s)}")
        try:
            late = self._ssh.stop(hosts, grace_s + STOP_MARGIN_S)
        except KeyboardInterrupt:
            raise Interrupted(f"stopped waiting; the ranks of {name} are stopping, and its machines still exist",
                              f"embark cancel {name} deletes them") from None
        except EmbarkError as error:
            self._notify(f"the ranks could not be stopped: {to_one_line(error.what)[:300]}")
            return
        if late:
            self._notify(f"{', '.join(names_of(late).values())}: killed after the grace period; its last checkpoint "
                         "may be older")

    def _settings(self, handle: RunHandle) -> dict[str, str]:
        """Return the variables that the commands name."""
        return {key: str(value) for key, value in handle.where.items() if key.isupper() or "%" in key}

    def _is_known(self, handle: RunHandle) -> bool:
        """Return whether the run's spec is here: it is written before the first change, and deleted with the
        machines."""
        return (handle.folder / SPEC).exists()

    def _job(self, handle: RunHandle) -> Job:
        return make_job(load_spec(str(handle.folder / SPEC)), load_catalog())


def submitted_s(handle: RunHandle) -> float | None:
    """When the run was submitted, in Unix time; None if its launch was interrupted or it is being cancelled."""
    path = handle.folder / SUBMITTED
    try:
        time_s = float(json.loads(path.read_text())["time_s"])
        if math.isfinite(time_s):
            return time_s
        raise ValueError(time_s)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        raise DamagedRecord(f"{path}: time_s cannot be read: {error!r}", path) from error
