"""`embark rehearse`: its flags and its output."""



from embark.errors import ExitCode, UserError
from embark.formatting import pluralize, to_one_line
from embark.rehearse.controller import Observer, read_duration
from embark.rehearse.manifest import load_manifests, read_texts
from embark.rehearse.rehearsal import Prepared, RehearsalReport
from embark.rehearse.rehearsal import rehearse as run_rehearsal
from embark.rehearse.server import find_server, prepare_server
from embark.rehearse.stream import find_stream_trainer, prepare_stream
from embark.rehearse.training import prepare_training
from .console import Console, Flag, Settings, Texts


def rehearse(
    spec: str, /, *, set_: Settings = (), nodes: int | None = None, processes: int = 2, preempt: Texts = (),
    kill: Texts = (), lose: Texts = (), steps: int = 100, limit: str = "10m", account: Flag = False,
    artifact: str = "", console: Console = Console()
) -> int:
    """Run the rendered job, pods and all, on this machine before paying for GPUs.

    Pods are process groups. The manifest's restart and failure policies apply.

    Exit code 1 unless all ranks connected, trained, saved and, after a fault, resumed.

    A server runs as two replicas, and one is killed under load: exit code 1 if a request fails or it does not restart.

    In a deployment that follows a stream each part is killed once; the servers must then answer with a newer version.

    Parameters
    ----------
    spec
        A spec, a folder from embark render, or a manifest of a Job, JobSet, TrainJob, PyTorchJob, RayJob or server.
    nodes
        Number of pods; place.nodes by default.
    processes
        Ranks per pod; in the cluster there is one per accelerator.
    preempt
        1@30s preempts pod 1 after 30 s, 1@step20 at step 20: SIGTERM, then SIGKILL after the grace period. Repeatable.
    kill
        1@30s kills pod 1 without notice, as when its machine dies.
    lose
        1@30s kills pod 1, and no machine is left for its replacement.
    steps
        Number of steps to train.
    limit
        Time limit: 10m, 90s.
    artifact
        For a server: the exported model to serve in place of the manifest's, such as runs/RUN/export.
    account
        Instead, run the scripts of a spec or of a folder, from an empty account and back, in a stand-in of the cloud.
    """
    if account:
        return _rehearse_account(spec, set_, console)
    limit_s = read_duration(limit, "--limit")
    if processes < 1 or steps < 1 or not limit_s or (nodes is not None and nodes < 1):
        raise UserError("--nodes, --processes, --steps and --limit must be greater than 0", "--processes 2")
    texts = load_manifests(spec, set_, nodes)
    objects = read_texts(texts)
    has_faults = bool(preempt or kill or lose)
    prepared: Prepared
    if find_stream_trainer(objects) is not None:
        if has_faults or artifact:
            raise UserError("a deployment that follows a stream is rehearsed by killing each of its parts",
                            "leave --artifact, --kill and other faults out")
        prepared = prepare_stream(texts, objects)
    elif find_server(objects) is not None:
        if has_faults:
            raise UserError("a server is rehearsed by killing one of its replicas",
                            "leave --kill and other faults out")
        prepared = prepare_server(texts, objects, artifact)
    else:
        if artifact:
            raise UserError("--artifact applies to servers; this manifest trains a model", "leave it out")
        prepared = prepare_training(texts, objects, where=spec, num_processes=processes, num_steps=steps,
                                    faults={"preempt": preempt, "kill": kill, "lose": lose})
        if prepared.run is not None and prepared.run.unread:
            console.warning(f"rehearsing on synthetic samples, not on your data: {prepared.run.unread}")
    for finding in prepared.lint:
        console.text(f"{finding.path}:{finding.line}: {finding.code} {finding.what}", style="yellow")
    console.text(prepared.title, style="bold")
    console.text("Differences from the cluster:")
    for change in prepared.changes:
        console.text(f"  {change}", style="dim")
    observer = Observer(
        lambda pod, rank, text: console.text(f"{pod}{f' [{rank}]' if rank else ''} | {text}"),
        lambda text: console.text(f"== {text}", style="cyan")
    )
    report = run_rehearsal(prepared, observer, limit_s=limit_s)
    console.show(report, _render)
    return ExitCode.DONE if report.verdict.is_ok else ExitCode.OTHER


def _rehearse_account(spec: str, settings: Settings, console: Console) -> int:
    from embark.rehearse.account import AccountRehearsal, StepResult, rehearse_account
    from embark.render.serving import SERVE_TARGETS

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
            made = "served" if result.target in ("follow", *SERVE_TARGETS) else "trained"
            console.result(f"rehearsed: from an empty account to a {made} model and back, {hours}; nothing is left "
                           "that costs money")
        console.text("Not modelled:")
        for line in result.not_modelled:
            console.text(f"  {line}", style="dim")

    result = rehearse_account(spec, settings, on_step)
    console.show(result, show)
    return ExitCode.DONE if result.is_ok else ExitCode.OTHER


def _render(console: Console, report: RehearsalReport) -> None:
    verdict = report.verdict
    if verdict.checks:
        console.table([{"": "ok" if check.is_ok else "NO", "check": check.name, "result": check.text}
                       for check in verdict.checks])
    console.result(f"{'rehearsed' if verdict.is_ok else 'FAILED'}: {verdict.sentence}")
    if verdict.evidence:
        console.text(f"  seen: {to_one_line(verdict.evidence)}")
    if verdict.fix:
        console.text(f"  fix: {verdict.fix}")
