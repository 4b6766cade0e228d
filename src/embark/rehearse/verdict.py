"""What a rehearsal shows (met, trained, saved, resumed), and its verdict in one sentence."""

from dataclasses import dataclass

from embark.formatting import format_duration, format_float
from embark.rehearse.root_cause import Case, Cause, find_root_cause, stopped_with_zero, trains_alone
from embark.rehearse.workload import Refusal, Workload


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that must hold."""

    name: str
    is_ok: bool
    text: str


@dataclass(frozen=True, slots=True)
class Verdict:
    """The answer."""

    is_ok: bool
    sentence: str
    fix: str = ""
    evidence: str = ""
    checks: tuple[Check, ...] = ()
    final_loss: float | None = None
    lost_steps: int = 0


def refused(workload: Workload, refusal: Refusal) -> Verdict:
    """No pod was ever made."""
    return Verdict(False, f"{workload.kind} {workload.name} starts no pod: {refusal.what}", refusal.fix)


def judge_outcome(case: Case) -> Verdict:
    """From what happened."""
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
        return [*checks, *_fault_checks(case)]
    sizes = progress.world_sizes
    met = bool(sizes) and all(size == expected for size in sizes)
    checks.append(Check("rendezvous", met, f"{sizes[-1]} ranks of {expected} met" if sizes else "the ranks never met"))
    trained = progress.is_done and progress.step == progress.num_steps > 0
    checks.append(Check("trained", trained, f"{progress.step} of {progress.num_steps or '?'} steps" + (
        f", loss {format_float(progress.final_loss, 6)}" if progress.final_loss is not None else "")))
    saved = f"saved {len(set(progress.saved))} times, last at step {progress.saved[-1]}" if progress.saved else "none"
    checks.append(Check("checkpoint", bool(progress.saved), saved))
    return [*checks, *_fault_checks(case)]


def _fault_checks(case: Case) -> list[Check]:
    outcome, progress = case.outcome, case.outcome.progress
    checks = [Check(str(fault), False, "the run ended before it") for fault in outcome.faults_left]
    lethal = [fault for fault in outcome.faults_done if fault.kind in ("preempt", "kill")]
    if lethal and case.run is not None:
        text = ", ".join(f"from step {one.step}, {one.lost_steps} steps lost" for one in progress.resumes)
        checks.append(Check("resumed", bool(progress.resumes), text or "never"))
    return checks


def _good(case: Case) -> str:
    progress = case.outcome.progress
    elapsed = format_duration(case.outcome.elapsed_s)
    if case.run is None:
        pods = "1 pod" if len(case.pods) == 1 else f"{len(case.pods)} pods"
        return f"{pods} ended well in {elapsed}; what they trained was not checked"
    resumed = ""
    if progress.resumes:
        lost = sum(one.lost_steps for one in progress.resumes)
        froms = ", ".join(str(one.step) for one in progress.resumes)
        resumed = f", resumed from step {froms} with {lost} steps lost"
    pods = "1 pod" if len(case.pods) == 1 else f"{len(case.pods)} pods"
    each = "1 process" if case.num_processes == 1 else f"{case.num_processes} processes"
    return f"{pods} of {each} met, trained {progress.step} steps and saved{resumed}, in {elapsed}"


def _fault_too_late(case: Case) -> Cause | None:
    if case.outcome.finish != "succeeded" or not case.outcome.faults_left or stopped_with_zero(case):
        return None
    fault = case.outcome.faults_left[0]
    elapsed = format_duration(case.outcome.elapsed_s)
    return Cause(f"the run ended after {elapsed}, before {fault}: that fault was not rehearsed",
                 f"--steps more than {case.outcome.progress.num_steps}, or the fault sooner")
