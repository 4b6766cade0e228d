"""Slurm: a batch job on the cluster whose commands run on this machine, which is a login node or one like it."""

import re
from dataclasses import replace
from itertools import chain
from pathlib import Path

from embark.catalog import load_catalog
from embark.errors import EmbarkError, Fault, UserError
from embark.formatting import format_duration, to_one_line
from embark.launch.backend import (
    CancelResult,
    LaunchBackend,
    LaunchRequest,
    LogLine,
    ReadLines,
    Replica,
    Resource,
    RunHandle,
    Status,
    absolute_run_uri,
    explain,
    explain_exit,
    file_reader,
)
from embark.launch.run_registry import registry_dir
from embark.launch.shell import CommandResult
from embark.render.job import SLURM, make_job
from embark.render.targets.slurm import SCRIPT, Search, grace_s, script
from embark.spec import RunSpec
from embark.store import write_atomic

JOB = "job_id"  # File with the number that Slurm gave the job.
WAITING = ("PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT", "RESV_DEL_HOLD")
RUNNING = ("RUNNING", "COMPLETING", "SUSPENDED", "STOPPED", "SIGNALING", "STAGE_OUT", "RESIZING")
END_S = 120.0  # Time in which Slurm itself ends what did not end by its grace period.
LAST_LINE = re.compile(rb"embark: the ranks ended with exit code (\d+)\n")
ORDER = ("running", "restarting", "pending", "failed", "gone", "succeeded")  # The state of several jobs is the first.
EPOCH = ("env", "SLURM_TIME_FORMAT=%s")  # Slurm's own format has no time zone.


class Slurm(LaunchBackend):
    """Submits the rendered script, and finds the job again by its number; the jobs of an array by its number too."""

    search: Search | None = None  # What is submitted as an array, instead of a run.

    def handle_of(self, spec: RunSpec) -> RunHandle:
        job, num_jobs = make_job(spec, load_catalog()), self.search.num_jobs if self.search else 0
        where = {"folder": str(registry_dir() / "slurm" / job.name), "object": job.name, "cwd": str(Path.cwd()),
                 "grace_s": grace_s(job), "num_jobs": num_jobs}
        return RunHandle(name=spec.name, backend=SLURM, where=where, title=job.title, run_uri=absolute_run_uri(spec),
                         usd_per_hour=job.usd_per_hour and job.usd_per_hour * max(1, num_jobs))

    def check(self, request: LaunchRequest) -> None:
        handle = request.handle
        found = self._ask("squeue", "--me", "--noheader", f"--name={handle.where['object']}", "--format=%A").split()
        if found:
            raise self._exists(f"job {found[0]} named {handle.where['object']}", handle)
        self.check_cluster(request)

    def check_cluster(self, request: LaunchRequest) -> str:
        """Return when and where Slurm would start the job; raises if it would not."""
        words = ["sbatch", "--test-only", *self._options(request.handle)]
        return to_one_line(self._checked(self._shell.ask(words, stdin=self._script(request))).err)

    def submit(self, request: LaunchRequest) -> None:
        handle, text = request.handle, self._script(request)
        path = handle.folder / SCRIPT
        if not self._shell.is_dry:
            (handle.folder / JOB).unlink(missing_ok=True)
            write_atomic(path, text)
        name = handle.where["object"]
        request.record(Resource(f"the job {name}", f"scancel --me --name={name}"))
        done = self._checked(self._shell.change(["sbatch", "--parsable", *self._options(handle), str(path)]))
        if not self._shell.is_dry:
            write_atomic(handle.folder / JOB, done.out.strip().partition(";")[0])

    def status(self, handle: RunHandle) -> Status:
        job_id = self._job_id(handle)
        if not job_id:
            return Status("gone", f"{handle.name} has no job", "embark launch submits it")
        found = [self._job_status(handle, one) for one in _jobs(handle, job_id)]
        first = min(found, key=lambda one: ORDER.index(one.state))
        return replace(first, replicas=tuple(chain(*(one.replicas for one in found))),
                       num_restarts=sum(one.num_restarts for one in found))

    def _job_status(self, handle: RunHandle, job_id: str) -> Status:
        job = self._job(handle, job_id)
        state, code = job.get("JobState", "").partition(" ")[0], int(job.get("ExitCode", "0").partition(":")[0])
        if not state:
            return Status("gone", f"job {job_id} is not known any more, and has not written how it ended",
                          f"embark watch {handle.run_uri} shows what it did")
        status = Status("running", since_s=_seconds(job, "StartTime"), num_restarts=int(job.get("Restarts", 0)))
        if state in WAITING:
            return status.become("restarting" if status.num_restarts else "pending", *self._why(job.get("Reason", "")))
        if state in RUNNING:
            nodes = self._ask("scontrol", "show", "hostnames", job["NodeList"]).split() if job.get("NodeList") else []
            first = int(job.get("ArrayTaskId", 0))
            return replace(status, replicas=tuple(Replica(node, index, "running", since_s=status.since_s)
                                                  for index, node in enumerate(nodes, first)))
        status = replace(status, ended_s=_seconds(job, "EndTime"))
        if state == "COMPLETED":
            return status.become("succeeded")
        if state == "FAILED" and code:
            return status.become("failed", *explain_exit(code))
        return status.become("failed", *self._why(state))

    def log_reader(self, handle: RunHandle) -> ReadLines:
        name = handle.where["object"]

        def reader(job_id: str) -> ReadLines:
            source = f"{name}{''.join(job_id.partition('_')[1:])}"
            return file_reader(self._log(handle, job_id),
                               lambda raw: LogLine.of(0, source, raw.decode(errors="replace"), None))

        readers = [reader(one) for one in _jobs(handle, self._job_id(handle))]
        return lambda: chain(*(read() for read in readers))

    def cancel(self, handle: RunHandle) -> CancelResult:
        """Let the ranks save and end, without another attempt, then end what is left of the job."""
        remains, job_id = (handle.checkpoints,), self._job_id(handle)
        status = self.status(handle)
        if not self._shell.is_dry and status.has_ended:
            return CancelResult((), remains)

        def has_ended() -> bool:
            return self.status(handle).has_ended

        limit_s = handle.where["grace_s"]
        self._change("scancel", "--state=PENDING", job_id)
        if status.state == "running":
            self._change("scontrol", "update", f"JobId={job_id}", "Requeue=0")
            self._change("scancel", "--signal=TERM", job_id)
            self._notify(f"stopping job {job_id}; it saves a last checkpoint, within {format_duration(limit_s)}")
            if not self._shell.is_dry and self._wait(handle, has_ended, limit_s):
                return CancelResult((f"job {job_id}",), remains)
        self._change("scancel", job_id)
        return CancelResult((f"job {job_id}",), remains, is_complete=self._wait(handle, has_ended, END_S))

    def _options(self, handle: RunHandle) -> list[str]:
        cwd = handle.where["cwd"]
        return [f"--chdir={cwd}", f"--output={cwd}/%x-{'%A_%a' if self.search else '%j'}.log"]

    def _log(self, handle: RunHandle, job_id: str) -> Path:
        return Path(handle.where["cwd"], f"{handle.where['object']}-{job_id}.log")

    def _script(self, request: LaunchRequest) -> str:
        return script(make_job(request.spec, load_catalog()), f"Trains {request.handle.title}.", self.search)

    def _job_id(self, handle: RunHandle) -> str:
        """Return the job's number; that of a job of this name if the launch was interrupted before it wrote it."""
        path = handle.folder / JOB
        if path.is_file():
            return path.read_text().strip()
        found = self._ask("squeue", "--me", "--noheader", f"--name={handle.where['object']}", "--format=%F").split()
        return found[0] if found else "JOB" if self._shell.is_dry else ""

    def _job(self, handle: RunHandle, job_id: str) -> dict[str, str]:
        """Return what the controller says of the job, else the accounting, else the end of its log."""
        done = self._shell.ask([*EPOCH, "scontrol", "--oneliner", "show", "job", job_id])
        if done.is_ok:
            return dict(re.findall(r"(\w+)=(\S*)", done.out))
        if "Invalid job id" not in done.err:
            raise _error(done)
        names = ("JobState", "ExitCode", "StartTime", "EndTime")
        done = self._shell.ask([*EPOCH, "sacct", "--noheader", "--parsable2", "--allocations", f"--jobs={job_id}",
                                "--format=State,ExitCode,Start,End"])
        if done.is_ok and done.out.strip():
            return dict(zip(names, done.out.splitlines()[-1].split("|"), strict=True))
        log = self._log(handle, job_id)
        found = LAST_LINE.findall(log.read_bytes()) if log.is_file() else []
        if not found:
            return {}
        code = int(found[-1])
        return {"JobState": "FAILED" if code else "COMPLETED", "ExitCode": f"{code}:0"}

    def _why(self, reason: str) -> tuple[str, str]:
        found = explain("slurm", reason)
        return (f"{found[0].text} ({reason})", found[0].fix) if found else ("" if reason == "None" else reason, "")

    def _ask(self, *words: str) -> str:
        return self._checked(self._shell.ask(words)).out

    def _change(self, *words: str) -> None:
        self._checked(self._shell.change(words))

    def _checked(self, done: CommandResult) -> CommandResult:
        if done.is_ok:
            return done
        raise _error(done)


def _jobs(handle: RunHandle, job_id: str) -> list[str]:
    """Return the number of the job, or of each job of an array."""
    return [f"{job_id}_{index}" for index in range(handle.where.get("num_jobs", 0))] or [job_id]


def _error(done: CommandResult) -> EmbarkError:
    said = to_one_line(done.err)[-300:]
    found = explain("slurm", said)
    return UserError(f"{found[0].text}: {said}", found[0].fix) if found else \
        Fault(f"Slurm refuses: {said}", "try the command again")


def _seconds(job: dict[str, str], name: str) -> float | None:
    text = job.get(name, "")
    return float(text) if text.isdigit() else None
