"""`embark rehearse`: its flags and its output."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from embark.cli.console import Console, Flag, Settings
from embark.errors import ExitCode, UserError
from embark.formatting import pluralize, to_one_line
from embark.rehearse.controller import Observer, read_duration
from embark.rehearse.downscale import Change
from embark.rehearse.manifest import read_texts
from embark.rehearse.rehearsal import EngineName, RehearsalOptions, RehearsalReport, load_manifests, prepare
from embark.rehearse.rehearsal import rehearse as run_rehearsal
from embark.rehearse.server import ServerReport, find_server, prepare_server, rehearse_services
from embark.rehearse.stream import find_stream_trainer, prepare_stream

Times = Annotated[tuple[str, ...], Parameter(negative="", show_default=False)]


def rehearse(
    spec: str, /, *, set_: Settings = (), nodes: int | None = None, processes: int = 2, files: Path | None = None,
    preempt: Times = (), kill: Times = (), lose: Times = (), pause: Times = (), cut: Times = (),
    engine: EngineName = "auto", image: str = "", steps: int = 100, limit: str = "10m", keep: Flag = False,
    account: Flag = False, artifact: str = "", console: Console = Console(),
) -> int:
    """Run the rendered job, pods and all, on this machine before paying for GPUs.

    Pods are containers of the image, or process groups. The manifest's restart and failure policies apply.

    Exit code 1 unless all ranks connected, trained, saved and, after a fault, resumed.

    A server runs as two replicas, and one is killed under load: exit code 1 if a request fails or it does not restart.

    In a deployment that follows a stream each part is killed once; the servers must then answer with a newer version.

    Parameters
    ----------
    spec
        A spec, a folder from embark render, or a manifest of a Job, JobSet, TrainJob, PyTorchJob, Pod or served model.
    nodes
        Number of pods; place.nodes by default.
    processes
        Ranks per pod; in the cluster there is one per accelerator.
    files
        Use the manifests in this folder, rendered from SPEC.
    preempt
        1@30s preempts pod 1 after 30 s, 1@step20 at step 20: SIGTERM, then SIGKILL after the grace period. Repeatable.
    kill
        1@30s kills pod 1 without notice, as when its machine dies.
    lose
        1@30s kills pod 1, and no machine is left for its replacement; 1@30s+60s: for 60 s.
    pause
        1@30s+10s pauses pod 1 for 10 s.
    cut
        1@30s+10s disconnects pod 1 from the network for 10 s. Needs containers.
    engine
        What runs the pods; auto: the first available of podman, docker and processes.
    image
        The container image; the manifest's by default.
    steps
        Number of steps to train.
    limit
        Time limit: 10m, 90s.
    keep
        Keep containers and folders, and print where they are.
    artifact
        For a server: the exported model to serve in place of the manifest's, such as runs/RUN/export.
    account
        Instead, run the rendered scripts, from an empty account to the job and back, against a stand-in of the cloud.
    """
    if account:
        return _rehearse_account(spec, set_, console)
    if processes < 1 or steps < 1 or (nodes is not None and nodes < 1):
        raise UserError("--nodes, --processes and --steps must be greater than 0", fix="--processes 2")
    options = RehearsalOptions(
        num_processes=processes, num_steps=steps, engine=engine, image=image, limit_s=read_duration(limit, "--limit"),
        faults=(("preempt", preempt), ("kill", kill), ("lose", lose), ("pause", pause), ("cut", cut)), keep=keep)
    texts, where = load_manifests(spec, set_, nodes, files)
    observer = Observer(
        lambda pod, rank, text: console.text(f"{pod}{f' [{rank}]' if rank else ''} | {text}"),
        lambda text: console.text(f"== {text}", style="cyan"),
    )
    objects = read_texts(texts)
    is_by_processes = engine in ("auto", "processes") and not any(words for _, words in options.faults)
    limits = {"limit_s": options.limit_s, "keep": options.keep}
    start: Callable[..., RehearsalReport | ServerReport]
    if find_stream_trainer(objects) is not None:
        if not is_by_processes or artifact:
            raise UserError("a deployment that follows a stream is rehearsed by processes, each of which is killed",
                            fix="leave --engine, --artifact, --kill and other faults out")
        stream = prepare_stream(texts, objects)
        lint, start = stream.lint, partial(rehearse_services, stream, observer, **limits)
        title = f"{stream.name}: {', '.join(stream.pods)} and servers"
    elif find_server(objects) is not None:
        if not is_by_processes:
            raise UserError("a server is rehearsed by processes, one of which is killed",
                            fix="leave --engine, --kill and other faults out")
        server = prepare_server(texts, objects, artifact)
        lint, start = server.lint, partial(rehearse_services, server, observer, **limits)
        title = f"Deployment {server.name}: {pluralize(len(server.pods), 'replica')}"
    else:
        if artifact:
            raise UserError("--artifact applies to servers; this manifest trains a model", fix="leave it out")
        prepared = prepare(texts, where, options)
        lint, start = prepared.lint, partial(run_rehearsal, prepared, options, observer)
        if prepared.run is not None and prepared.run.unread:
            console.warning(f"rehearsing on synthetic samples, not on your data: {prepared.run.unread}")
        workload = prepared.workload
        title = (f"{workload.kind} {workload.name}: {pluralize(len(workload.pods), 'pod')} of "
                 f"{processes} {'process' if processes == 1 else 'processes'}")
    for finding in lint:
        console.text(f"{finding.path}:{finding.line}: {finding.code} {finding.what}", style="yellow")
    console.text(title, style="bold")
    report = start(on_start=partial(_show_start, console))
    console.show(report, _render)
    return ExitCode.DONE if report.verdict.is_ok else ExitCode.OTHER


def _show_start(console: Console, changes: Sequence[Change], engine: str) -> None:
    console.text("Differences from the cluster:")
    for change in changes:
        console.text(f"  {change}", style="dim")
    console.text(engine)


def _rehearse_account(spec: str, settings: Settings, console: Console) -> int:
    from embark.rehearse.account import AccountRehearsal, StepResult, rehearse_account

    def on_step(step: StepResult) -> None:
        console.text(f"{'ok' if step.is_ok else 'NO'}  {step.title}: {pluralize(step.num_commands, 'command')}")
        if not step.is_ok:
            console.text(step.output[-4000:], style="dim")

    def show(console: Console, result: AccountRehearsal) -> None:
        for line in result.assumed:
            console.text(f"assumed: {line}", style="dim")
        failed = next((step for step in result.steps if not step.is_ok), None)
        hours = f"{result.elapsed_s / 3600:.1f} h of the account's clock"
        if failed is not None:
            console.result(f"FAILED at {failed.title}: {to_one_line(failed.error)}")
            if failed.command:
                console.text(f"  command: {to_one_line(failed.command)}")
        elif result.paid:
            console.result(f"FAILED: still charged at the end: {', '.join(result.paid)}")
        else:
            console.result(f"rehearsed: from an empty account to a trained model and back, {hours}; nothing is left "
                           "that costs money")
        console.text("Not modelled:")
        for line in result.not_modelled:
            console.text(f"  {line}", style="dim")

    result = rehearse_account(spec, settings, on_step)
    console.show(result, show)
    return ExitCode.DONE if result.is_ok else ExitCode.OTHER


def _render(console: Console, report: RehearsalReport | ServerReport) -> None:
    verdict = report.verdict
    if verdict.checks:
        console.table([{"": "ok" if check.is_ok else "NO", "check": check.name, "result": check.text}
                       for check in verdict.checks])
    console.result(f"{'rehearsed' if verdict.is_ok else 'FAILED'}: {verdict.sentence}")
    if verdict.evidence:
        console.text(f"  seen: {to_one_line(verdict.evidence)}")
    if verdict.fix:
        console.text(f"  fix: {verdict.fix}")
    if report.left_behind:
        console.text(f"kept: {report.left_behind}")
