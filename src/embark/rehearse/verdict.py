"""What a rehearsal shows (met, trained, saved, resumed), its verdict in one sentence, and why it failed: from what
happened, and from the manifest."""

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from embark.errors import ExitCode
from embark.formatting import format_duration, format_float, pluralize
from embark.rehearse.controller import Outcome
from embark.rehearse.downscale import Run, launch_of
from embark.rehearse.pods import Pod, why_not
from embark.rehearse.workload import Cause, Workload

KILLED = 137
"""128 and SIGKILL."""
_NO_FILE = re.compile(r"can't open file '([^']+)'|No module named '?([\w.]+)'?|([\w./-]+\.py): No such file")
_NO_PROGRAM = re.compile(r'exec: "([^"]+)": (?:executable file not found|stat|no such file)|'
                         r'executable file `([^`]+)` not found|([\w./-]+): (?:command )?not found')


@dataclass(frozen=True, slots=True)
class Case:
    """A finished rehearsal to explain."""

    workload: Workload
    outcome: Outcome
    run: Run | None
    num_processes: int

    @property
    def pods(self) -> tuple[Pod, ...]:
        return self.workload.pods


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


def refused(workload: Workload, refusal: Cause) -> Verdict:
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
    """The first that fits: what the manifest itself makes sure of comes before what the lines say."""
    checks: Sequence[Callable[[Case], Cause | None]] = (
        _missing, _undefined, _no_program, _no_script, _unresolvable, _not_as_many, _stopped_with_zero, _alone,
        _refused_by_the_run, _too_slow, _out_of_memory, _from_lines, _too_long,
    )
    for check in checks:
        if (cause := check(case)) is not None:
            return cause
    return Cause(case.outcome.reason, "see the lines above; --keep keeps the pods' folders", _last_line(case))


def stopped_with_zero(case: Case) -> list[str]:
    """Pods that exited with 0 after SIGTERM."""
    return [end.name for end in case.outcome.ends if end.is_preempted and end.code == 0]


def trains_alone(case: Case) -> bool:
    """Several pods whose command does not join them."""
    launches = [launch_of(pod) for pod in case.pods]
    return len(case.pods) > 1 and all(one is not None and one.program == "python" for one in launches)


def _missing(case: Case) -> Cause | None:
    for pod in case.pods:
        if pod.missing:
            return Cause(f"{_listed([pod.name for pod in case.pods if pod.missing])} cannot start: there is no "
                         f"{_listed(pod.missing)}", "put it into the same files, or make it before the job")
    return None


def _undefined(case: Case) -> Cause | None:
    found = [(pod, pod.undefined[0]) for pod in case.pods if pod.undefined]
    if not found or _has_met(case):
        return None
    name = found[0][1]
    word = next((word for word in found[0][0].words if f"$({name})" in word), f"$({name})")
    right = _right_endpoint(case)
    return Cause(f"{_pods(pod for pod, _ in found)} get the literal text {word}: nothing defines {name}, so "
                 "Kubernetes does not expand it, and torchrun finds no such host",
                 f"write the name that the first pod will have: {right}",
                 _line_with(case, re.compile(re.escape(f"$({name})"))))


def _unresolvable(case: Case) -> Cause | None:
    if _has_met(case):
        return None
    names = case.workload.names
    for pod in case.pods:
        launch = launch_of(pod)
        host = launch.endpoint_host if launch is not None else ""
        if not host or "$" in host or host == "localhost" or re.fullmatch(r"[\d.]+", host) or names.resolves(host):
            continue
        why, fix = why_not(host, case.pods, case.workload.services)
        who = _pods(pod for pod in case.pods if pod.hostname != host)
        return Cause(f"{who} wait for {host}, a name that does not resolve: {why}", fix,
                     _line_with(case, re.compile(re.escape(host) + r"|name or service not known|gaierror|"
                                                 r"Name does not resolve|name resolution", re.IGNORECASE)))
    return None


def _not_as_many(case: Case) -> Cause | None:
    for pod in case.pods:
        launch = launch_of(pod)
        if launch is None or not launch.is_torchrun or launch.nnodes is None:
            continue
        low, high = launch.nnodes
        count = len(case.pods)
        if count < low and case.outcome.finish == "too long":
            return Cause(f"{_pods(case.pods)} wait for {low} machines, and the {case.workload.kind} makes "
                         f"{pluralize(count, 'pod')}: --nnodes={low}",
                         f"as many in --nnodes as in parallelism: {low}, or {count}")
        if count > high and case.outcome.finish != "succeeded":
            return Cause(f"{pluralize(count, 'pod')} for a rendezvous of {high}: --nnodes={high}, so "
                         f"{count - high} of them {'waits' if count - high == 1 else 'wait'} forever and the job "
                         "never ends", f"as many in --nnodes as in parallelism: {count}")
        if low < high and case.run is not None and not _has_met(case):
            return Cause(f"the rendezvous takes {low} to {high} machines, so it may begin before all have arrived",
                         f"--nnodes={count}")
    return None


def _no_program(case: Case) -> Cause | None:
    if 127 not in {end.code for end in case.outcome.ends}:
        return None
    line = _line_with(case, _NO_PROGRAM)
    match = _NO_PROGRAM.search(line)
    program = next(filter(None, match.groups()), "") if match else ""
    return Cause(f"{program or 'the command'} is not in the image", "build it into the image, or name what is there",
                 line)


def _no_script(case: Case) -> Cause | None:
    line = _line_with(case, _NO_FILE)
    match = _NO_FILE.search(line)
    if match is None or case.outcome.finish != "failed":
        return None
    if match[2]:
        return Cause(f"the module {match[2]} is not in the image", "build it into the image", line)
    script = match[1] or match[3]
    launch = launch_of(case.pods[0])
    alone = ""
    if launch is not None and not launch.is_torchrun and len(case.pods) > 1:
        alone = f"; and {launch.program} would start one process in each pod, which train alone"
    name = launch.script if launch is not None and launch.script else script
    return Cause(f"the script {name} is not in the image{alone}",
                 "COPY it into the image" + (", and start it by torchrun" if alone else ""), line)


def _stopped_with_zero(case: Case) -> Cause | None:
    pods = stopped_with_zero(case)
    if not pods:
        return None
    return Cause(f"{_listed(pods)} exited with 0 after SIGTERM: the {case.workload.kind} counts it as "
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
    """Exit code 64: the run's own words are the best there are."""
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
    """A container engine does not always say so, but here nobody else kills a pod in silence."""
    if case.outcome.finish != "failed":
        return None
    killed = {end.name for end in case.outcome.ends
              if end.code == KILLED and not end.is_preempted and not end.is_deleted}
    for pod in case.pods:
        if pod.name in killed:
            limit = (f"its memory limit of {pod.memory_bytes / 2**20:,.0f} MiB" if pod.memory_bytes
                     else "this machine's memory")
            return Cause(f"{pod.name} was killed without notice (exit code {KILLED}): it exceeded {limit}",
                         "a higher limits.memory, or a command that needs less; embark plan predicts what a run needs")
    return None


def _from_lines(case: Case) -> Cause | None:
    """What the rules of `embark diagnose` find in the pods' lines."""
    if case.outcome.finish == "succeeded":
        return None
    from embark.diagnose.diagnose import diagnose
    from embark.diagnose.source import Source

    if case.outcome.progress.errors:
        return Cause(case.outcome.progress.errors[-1].partition("\n")[0], "fix that, and rehearse again")
    with TemporaryDirectory(prefix="embark-rehearse-logs-") as folder:
        sources = []
        for name, tail in case.outcome.tails.items():
            path = Path(folder) / f"{name}.log"
            path.write_text("\n".join(tail) + "\n", encoding="utf-8")
            sources.append(Source(name, "log", path))
        found = diagnose(sources).diagnoses
    if not found:
        return None
    first = found[0]
    return Cause(first.cause, first.fix, first.evidence.text.strip())


def _too_slow(case: Case) -> Cause | None:
    if case.outcome.finish != "too long" or not _has_met(case):
        return None
    progress = case.outcome.progress
    return Cause(f"the run was at step {progress.step} of {progress.num_steps} at the time limit, and "
                 f"{_listed(case.outcome.running) or 'no pod'} had not ended", "fewer --steps, or a longer --limit")


def _too_long(case: Case) -> Cause | None:
    if case.outcome.finish != "too long":
        return None
    what = "met" if case.run is not None else "ended"
    return Cause(f"{_listed(case.outcome.running)} had not {what} at the time limit", "a longer --limit, such as 20m",
                 _last_line(case))


def _has_met(case: Case) -> bool:
    return bool(case.outcome.progress.world_sizes)


def _right_endpoint(case: Case) -> str:
    first = min(case.pods, key=lambda pod: pod.index)
    port = "29500"
    if not case.workload.is_indexed:
        return f"{case.workload.name}-0.SERVICE:{port}, with completionMode: Indexed, subdomain and a headless Service"
    service = first.subdomain or "SERVICE"
    has_service = any(one.name == first.subdomain and one.is_headless for one in case.workload.services)
    also = "" if has_service else f", with {'' if first.subdomain else 'subdomain and '}a headless Service {service}"
    return f"{first.hostname}.{service}:{port}{also}"


def _line_with(case: Case, pattern: re.Pattern[str]) -> str:
    lines = (line for tail in case.outcome.tails.values() for line in tail)
    return next((line.strip() for line in lines if pattern.search(line)), "")


def _last_line(case: Case) -> str:
    lines = [line for tail in case.outcome.tails.values() for line in tail[-1:]]
    return lines[-1].strip() if lines else ""


def _pods(pods: Iterable[Pod]) -> str:
    numbers = [str(pod.index) for pod in pods]
    return f"pod {numbers[0]}" if len(numbers) == 1 else f"pods {_listed(numbers)}"


def _listed(words: Sequence[str]) -> str:
    return " and ".join(filter(None, [", ".join(words[:-1]), *words[-1:]]))
