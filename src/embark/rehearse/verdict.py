"""The verdict of a rehearsal: what it showed (met, trained, saved, resumed) and, if it failed, why."""

import re
from collections.abc import Callable, Iterable, Sequence

from embark.errors import ExitCode
from embark.formatting import format_duration, format_float, join_words, pluralize
from embark.kubernetes.pods import Pod
from embark.lint.rule import Finding
from embark.values import frozen
from .controller import Outcome
from .downscale import RehearsedRun, launch_of
from .workload import Cause, Workload

_NEVER_MEET = ("undefined-variable", "nnodes-differs")
_NO_SUCH_NAME = ("not-indexed", "endpoint-not-a-pod-name", "service-not-given", "service-not-headless",
                 "service-selects-nothing", "not-ready-addresses")
"""Rules of the linter that explain a rendezvous which never happens; the second, a host that does not resolve."""
KILLED = 137  # 128 and SIGKILL.


@frozen
class Case:
    """A finished rehearsal to explain."""

    workload: Workload
    outcome: Outcome
    run: RehearsedRun | None
    num_processes: int
    findings: tuple[Finding, ...] = ()  # The linter's, of the manifest.

    @property
    def pods(self) -> tuple[Pod, ...]:
        """The pods that train."""
        return self.workload.trainers


@frozen
class Check:
    """One condition of a good rehearsal."""

    name: str
    is_ok: bool
    text: str


@frozen
class Verdict:
    """Whether the rehearsal passed, and if not why."""

    is_ok: bool
    sentence: str
    fix: str = ""
    evidence: str = ""
    checks: tuple[Check, ...] = ()
    final_loss: float | None = None
    lost_steps: int = 0


def refused(workload: Workload, refusal: Cause) -> Verdict:
    """Return the verdict on a job of which no pod was ever made."""
    return Verdict(False, f"{workload.kind} {workload.name} starts no pod: {refusal.what}", refusal.fix)


def judge_outcome(case: Case) -> Verdict:
    """Return the verdict on what happened."""
    checks = tuple(_checks(case))
    progress = case.outcome.progress
    lost = sum(one.lost_steps for one in progress.resumes)
    if all(check.is_ok for check in checks):
        return Verdict(True, _good(case), checks=checks, final_loss=progress.final_loss, lost_steps=lost)
    cause = _fault_too_late(case) or find_root_cause(case)
    return Verdict(False, cause.what, cause.fix, cause.evidence, checks, progress.final_loss, lost)


def _checks(case: Case) -> list[Check]:
    outcome, progress = case.outcome, case.outcome.progress
    expected = len(case.pods) * case.num_processes
    checks = [Check("controller", outcome.finish == "succeeded" and not stopped_with_zero(case), outcome.reason)]
    if case.run is None:
        joined = not trains_alone(case)
        text = "the pods do not train with Embark: only their exit codes are checked"
        checks.append(Check("ranks", joined, text if joined else "each pod trains alone"))
    else:
        sizes = progress.world_sizes
        counts = case.run.spec.place.node_counts if case.run.spec.place.is_elastic else [len(case.pods)]
        met = bool(sizes) and all(size in [num * case.num_processes for num in counts] for size in sizes)
        text = f"{', then '.join(map(str, dict.fromkeys(sizes)))} ranks of {expected} met" if sizes else \
            "the ranks never met"
        checks.append(Check("rendezvous", met, text))
        trained = progress.is_done and progress.step == progress.num_steps > 0
        loss = f", loss {format_float(progress.final_loss, 6)}" if progress.final_loss is not None else ""
        checks.append(Check("trained", trained, f"{progress.step} of {progress.num_steps or '?'} steps{loss}"))
        saved = progress.saved
        text = f"saved {len(set(saved))} times, last at step {saved[-1]}" if saved else "none"
        checks.append(Check("checkpoint", bool(saved), text))
    checks += [Check(str(fault), False, "the run ended before it") for fault in outcome.faults_left]
    if case.run is not None and any(fault.kind in ("preempt", "kill", "lose") for fault in outcome.faults_done):
        text = ", ".join(f"from step {one.step}, {one.lost_steps} steps lost" for one in progress.resumes)
        checks.append(Check("resumed", bool(progress.resumes), text or "never"))
    return checks


def _good(case: Case) -> str:
    progress = case.outcome.progress
    elapsed = format_duration(case.outcome.elapsed_s)
    if case.run is None:
        return f"{pluralize(len(case.pods), 'pod')} ended well in {elapsed}; what they trained was not checked"
    resumed = ""
    if progress.resumes:
        lost = sum(one.lost_steps for one in progress.resumes)
        froms = ", ".join(str(one.step) for one in progress.resumes)
        resumed = f", resumed from step {froms} with {lost} steps lost"
    each = "1 process" if case.num_processes == 1 else f"{case.num_processes} processes"
    return (f"{pluralize(len(case.pods), 'pod')} of {each} met, trained {progress.step} steps and saved{resumed}, in "
            f"{elapsed}")


def _fault_too_late(case: Case) -> Cause | None:
    if case.outcome.finish != "succeeded" or not case.outcome.faults_left or stopped_with_zero(case):
        return None
    fault = case.outcome.faults_left[0]
    elapsed = format_duration(case.outcome.elapsed_s)
    return Cause(f"the run ended after {elapsed}, before {fault}: that fault was not rehearsed",
                 f"--steps more than {case.outcome.progress.num_steps}, or the fault sooner")


def find_root_cause(case: Case) -> Cause:
    """Return the first cause that fits: what follows from the manifest comes before what the lines say."""
    checks: Sequence[Callable[[Case], Cause | None]] = (
        _missing, _cannot_meet, _stopped_with_zero, _refused_by_the_run, _too_slow, _out_of_memory, _from_lines, _alone,
        _too_long
    )
    for check in checks:
        if (cause := check(case)) is not None:
            return cause
    return Cause(case.outcome.reason, "see the lines above", _last_line(case))


def stopped_with_zero(case: Case) -> list[str]:
    """Return pods that exited with 0 after SIGTERM."""
    return [end.name for end in case.outcome.ends if end.is_preempted and end.code == 0]


def trains_alone(case: Case) -> bool:
    """Return whether several pods train without joining each other."""
    launches = [launch_of(pod) for pod in case.pods]
    return len(case.pods) > 1 and all(one is not None and one.program == "python" for one in launches)


def _missing(case: Case) -> Cause | None:
    lacking = [pod for pod in case.workload.pods if pod.missing]
    if not lacking:
        return None
    names, missing = join_words([pod.name for pod in lacking]), join_words(lacking[0].missing)
    return Cause(f"{names} cannot start: there is no {missing}",
                 "put it into the same files, or make it before the job")


def _cannot_meet(case: Case) -> Cause | None:
    """Return the linter's reasons, if the manifest itself keeps the ranks from meeting."""
    sizes = case.outcome.progress.world_sizes
    if case.outcome.finish == "succeeded" or (sizes and min(sizes) == len(case.pods) * case.num_processes):
        return None
    host = next(filter(None, map(_endpoint_host, case.pods)), "")
    is_lost = not re.fullmatch(r"|localhost|[\d.]+|.*\$.*", host) and host not in case.workload.names
    found = [one for one in case.findings if one.name in _NEVER_MEET or (is_lost and one.name in _NO_SUCH_NAME)]
    if not found and not is_lost:
        return None
    waits = f"wait for {host}, a name that does not resolve" if is_lost else "cannot meet"
    text = re.compile(rf"{re.escape(host) if host else ' '}|name or service not known|gaierror|Name does not resolve|"
                      r"name resolution|\$\(\w+\)", re.IGNORECASE)
    return Cause(f"{_pods(case.pods)} {waits}: {'; '.join(one.what for one in found) or 'no Service leads to it'}",
                 "; ".join(one.fix for one in found) or "the first pod's name below a headless Service that selects it",
                 _line_with(case, text))


def _stopped_with_zero(case: Case) -> Cause | None:
    pods = stopped_with_zero(case)
    if not pods:
        return None
    return Cause(f"{join_words(pods)} exited with 0 after SIGTERM: the {case.workload.kind} counts it as "
                 "complete, though it is not trained, and does not replace it",
                 "exit with another code after SIGTERM, such as 75, and let podFailurePolicy ignore it")


def _alone(case: Case) -> Cause | None:
    sizes = case.outcome.progress.world_sizes
    expected = len(case.pods) * case.num_processes
    if trains_alone(case) or (sizes and max(sizes) < expected and max(sizes) <= case.num_processes):
        program = next((one.program for pod in case.pods if (one := launch_of(pod)) is not None), "python")
        return Cause(f"each pod trains alone: {program} starts one process in each, and nothing joins them",
                     "start by torchrun, with --nnodes, --nproc-per-node and one rendezvous endpoint for all")
    return None


def _refused_by_the_run(case: Case) -> Cause | None:
    """Return the run's own error after exit code 64, which is the best explanation."""
    if case.outcome.finish != "failed" or ExitCode.BAD_INPUT not in {end.code for end in case.outcome.ends}:
        return None
    for tail in case.outcome.tails.values():
        lines = [line.strip() for line in tail if line.strip()]
        first = next((at for at, line in enumerate(lines) if line.startswith("error:")), None)
        if first is not None:
            said = [line.removeprefix("error: ") for line in lines[first:first + 3]]
            return Cause(f"the run rejects its spec or its data: {'; '.join(said)}",
                         "fix what it names; if the image is older than the spec, rebuild it")
    return None


def _out_of_memory(case: Case) -> Cause | None:
    """Nothing else here kills a pod without notice."""
    killed = [end.name for end in case.outcome.ends
              if end.code == KILLED and not end.is_preempted and not end.is_deleted]
    if case.outcome.finish != "failed" or not killed:
        return None
    return Cause(f"{killed[0]} was killed without notice (exit code {KILLED}): it exceeded this machine's memory",
                 "a command that needs less; embark plan predicts what a run needs")


def _from_lines(case: Case) -> Cause | None:
    """Return the first cause that `embark diagnose` finds in the pods' lines."""
    if case.outcome.finish == "succeeded":
        return None
    from embark.diagnose.report import diagnose
    from embark.diagnose.source import DiagnosedFile

    if case.outcome.progress.errors:
        return Cause(case.outcome.progress.errors[-1].partition("\n")[0], "fix that, and rehearse again")
    tails = {name: "\n".join(tail) + "\n" for name, tail in case.outcome.tails.items()}
    found = diagnose([DiagnosedFile(name, "log", data=text.encode()) for name, text in tails.items()]).diagnoses
    if not found:
        return None
    first = found[0]
    return Cause(first.cause, first.fix, first.evidence.text.strip())


def _too_slow(case: Case) -> Cause | None:
    if case.outcome.finish != "too long" or not case.outcome.progress.world_sizes:
        return None
    progress = case.outcome.progress
    return Cause(f"the run was at step {progress.step} of {progress.num_steps} at the time limit, and "
                 f"{join_words(case.outcome.running) or 'no pod'} had not ended", "fewer --steps, or a longer --limit")


def _too_long(case: Case) -> Cause | None:
    if case.outcome.finish != "too long":
        return None
    what = "met" if case.run is not None else "ended"
    return Cause(f"{join_words(case.outcome.running)} had not {what} at the time limit",
                 "a longer --limit, such as 20m", _last_line(case))


def _endpoint_host(pod: Pod) -> str:
    launch = launch_of(pod)
    return launch.endpoint_host if launch is not None else ""


def _line_with(case: Case, pattern: re.Pattern[str]) -> str:
    lines = (line for tail in case.outcome.tails.values() for line in tail)
    return next((line.strip() for line in lines if pattern.search(line)), "")


def _last_line(case: Case) -> str:
    lines = [line for tail in case.outcome.tails.values() for line in tail[-1:]]
    return lines[-1].strip() if lines else ""


def _pods(pods: Iterable[Pod]) -> str:
    numbers = [str(pod.index) for pod in pods]
    return f"pod {numbers[0]}" if len(numbers) == 1 else f"pods {join_words(numbers)}"
