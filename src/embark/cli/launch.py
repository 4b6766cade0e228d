"""`embark launch`: launch a run where its spec says, and with `--supervise` stay and re-create lost spot machines."""

from embark.errors import ExitCode, Interrupted, UserError
from embark.formatting import to_one_line
from embark.launch.launching import (
    LaunchResult,
    PreparedLaunch,
    find_active,
    launch_result,
    launch_title,
    prepare_launch,
    recover_until_ended,
    submit_launch,
)
from embark.launch.run_registry import RunRecord, run_status
from embark.launch.shell import DryRunShell, Shell
from embark.spec import RunSpec, accepting, load_spec
from .console import Accepted, Console, Flag, Settings, Spec


def launch(
    spec: Spec, /, *, set_: Settings = (), yes: Flag = False, dry_run: Flag = False, supervise: Flag = False,
    budget: float | None = None, context: str = "", accept_change: Accepted = (), console: Console = Console()
) -> int:
    """Launch a run where its spec says: here, Kubernetes, Ray, Slurm, Vertex AI, VMs or TPU VMs.

    Shows verdict and price, and asks for confirmation before it spends.

    With --supervise, Ctrl-C leaves the run running, and the exit code is 1 if the run fails.

    Parameters
    ----------
    yes
        Do not ask for confirmation.
    dry_run
        Print the commands without running them.
    supervise
        Wait for the end and re-create lost spot VMs and TPUs. Given a launched run's name, resume its supervision.
    budget
        Budget in dollars, as place.budget_usd: before exceeding it, the run saves and ends.
    context
        kubectl context; the current one by default.
    """
    if supervise and dry_run:
        raise UserError("--supervise and --dry-run are mutually exclusive", "leave one out")
    if supervise and (run := find_active(spec, Shell(), console.warning)) is not None:
        return _supervise(console, run)
    sets = [*set_, *([f"place.budget_usd={budget}"] if budget is not None else [])]
    return launch_run(console, accepting(load_spec(spec, sets), accept_change), yes=yes, dry_run=dry_run,
                      context=context, is_supervised=supervise)


def launch_run(console: Console, spec: RunSpec, *, yes: bool, dry_run: bool, context: str = "",
               is_supervised: bool = False) -> int:
    """Show verdict and price, ask for confirmation, and launch. A run that costs nothing needs no confirmation."""
    shell = DryRunShell(lambda line: None if console.json else console.raw(f"{line}\n")) if dry_run else Shell()
    prepared = prepare_launch(spec, shell, console.warning, context=context)
    if dry_run and not spec.place.image and prepared.handle.backend.startswith(("kubernetes", "vertex")):
        console.warning("place.image is not set, so a launch would stop before these commands: embark image SPEC --tag "
                        "REGISTRY/embark:1 --push builds, pushes and sets it")
    return submit_prepared(console, prepared, shell, yes=yes, is_supervised=is_supervised)


def submit_prepared(console: Console, prepared: PreparedLaunch, shell: Shell, *, yes: bool,
                    is_supervised: bool = False) -> int:
    if prepared.estimate is not None:
        console.text(prepared.estimate.verdict)
        console.text(prepared.estimate.price, style="bold")
    if isinstance(shell, DryRunShell):
        prepared.backend.submit(prepared.request)
        console.show(launch_result(prepared, commands=tuple(shell.recorded)), lambda console, result: console.result(
            f"{to_one_line(result.title)}: dry run, nothing was launched"))
        return ExitCode.DONE
    if prepared.estimate and not yes and not console.confirm(f"Launch {launch_title(prepared.handle)}?", "--yes"):
        raise Interrupted("nothing was launched", "")
    run = submit_launch(prepared)
    if not is_supervised:
        try:
            console.show(launch_result(prepared), _render)
        except KeyboardInterrupt:  # the run is launched, whether or not this was printed
            raise Interrupted(f"stopped by Ctrl-C; {launch_title(prepared.handle)} is launched",
                              f"embark cancel {run.handle.name} ends it") from None
        return ExitCode.DONE
    if not console.json:
        _render(console, launch_result(prepared))
    if not prepared.backend.can_recover:
        console.warning(f"--supervise is not needed on {run.handle.backend}: it restarts lost runs itself, or has no "
                        "machines to re-create")
        console.show(launch_result(prepared), lambda *_: None)
        return ExitCode.DONE
    return _supervise(console, run, prepared)


def _supervise(console: Console, run: RunRecord, prepared: PreparedLaunch | None = None) -> int:
    console.text(f"supervising {run.handle.name}; Ctrl-C leaves the run running")
    status = recover_until_ended(run, Shell(), console.warning)
    result = launch_result(prepared, status=status) if prepared else run_status(run, Shell(), console.warning)
    console.show(result, lambda console, result: console.result(
        f"{to_one_line(result.title)}: {result.state}" + (f": {result.reason}" if result.reason else "")))
    return ExitCode.OTHER if status.state == "failed" else ExitCode.DONE


def _render(console: Console, result: LaunchResult) -> None:
    console.result(f"{to_one_line(result.title)}: launched")
    console.text(f"embark status {result.name}; embark logs {result.name} --follow; embark cancel {result.name}")
