"""The verbs. Each turns words into one call and one exit code; none imports torch before it must."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from cyclopts import App, Parameter

from embark import __version__
from embark.cli.catalog import catalog
from embark.cli.cost import cost, doctor
from embark.cli.diagnose import diagnose
from embark.cli.launch import cancel, launch, logs, status
from embark.cli.options import Flag, OutputOptions, Settings, Spec
from embark.cli.plan import lint, plan, render
from embark.cli.rehearse import rehearse
from embark.cli.report import compare, report
from embark.cli.watch import watch
from embark.errors import ExitCode, UserError, nearest

app = App(
    name="embark",
    help="Train recommendation models on TorchRec, from a laptop to a GPU fleet, from one spec.",
    version=__version__,
    help_format="plaintext",
)


@app.command
def train(
    spec: Spec,
    /,
    *,
    set_: Settings = (),
    fresh: Flag = False,
    output: OutputOptions | None = None,
) -> int:
    """Train a spec here: on the CPU, on one GPU, as a rank under torchrun, or in JAX on TPUs.

    A run that was stopped goes on from its last checkpoint; one that is finished is left alone.

    Parameters
    ----------
    fresh
        Begin in a new directory (NAME-2, NAME-3, …) whatever there is already.
    """
    from embark.spec import load_spec
    from embark.stack.versions import require_stack

    console = (output or OutputOptions()).console()
    run = load_spec(spec, set_)
    from embark.run.signals import StopSignals
    from embark.trainers.jax.packages import require_jax, wants_jax

    is_in_jax = wants_jax(run)
    if is_in_jax:
        require_jax(run)
    else:
        require_stack()
    with StopSignals() as signals:  # torch and jax take seconds to load, and a machine can be taken away in them
        from embark.cli.report_output import ReportAtEnd

        view = [ReportAtEnd(), console.view()]
        from embark.plan.local import predict_local

        if is_in_jax:
            from embark.trainers.jax.loop import train as train_in_jax

            train_in_jax(run, view, fresh=fresh, signals=signals, foresee=predict_local)
        else:
            from embark.trainers.torch.loop import train as train_run

            train_run(run, view, fresh=fresh, signals=signals, foresee=predict_local)
    return ExitCode.DONE


@app.command
def init(
    preset: str = "quickstart",
    /,
    *,
    out: Annotated[Path | None, Parameter(allow_leading_hyphen=True)] = None,
    force: Flag = False,
    output: OutputOptions | None = None,
) -> int:
    """Write a starter spec: laptop, quickstart, criteo-1tb or mlperf-dcnv2.

    Parameters
    ----------
    preset
        What to start from.
    out
        The file to write; PRESET.toml where it is not given, `-` for standard output.
    force
        Overwrite the file if it exists.
    """
    from embark.spec import PRESETS
    from embark.spec.starter import starter
    from embark.store import write_atomic

    console = (output or OutputOptions()).console()
    if preset not in PRESETS:
        raise UserError(f"{preset}: no such preset", fix=nearest(preset, PRESETS))
    text = starter(preset)
    path = out or Path(f"{preset}.toml")
    if str(path) == "-":
        console.raw(text)
        return ExitCode.DONE
    if path.exists() and not force:
        raise UserError(f"{path}: exists already", fix="--force overwrites it; --out FILE writes elsewhere")
    try:
        write_atomic(path, text)
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from error
    console.data({"path": str(path), "preset": preset})
    console.text(f"wrote {path}; next: embark train {path}")
    return ExitCode.DONE


@app.command
def checkpoints(
    run: str,
    /,
    *,
    verify: Flag = False,
    prune: Flag = False,
    diff: Annotated[tuple[int, int] | None, Parameter(negative="", show_default=False)] = None,
    yes: Flag = False,
    dry_run: Flag = False,
    output: OutputOptions | None = None,
) -> int:
    """List a run's checkpoints: when, how large, and why each is kept.

    Parameters
    ----------
    run
        A run's directory, its name under ./runs, or its uri.
    verify
        Read every byte and say which are damaged. Exit code 1 if one is.
    prune
        Remove what the run's own [store] rules let go, and what unfinished saves left.
    diff
        Show what differs between the checkpoints of two steps.
    yes
        With --prune: do not ask.
    dry_run
        With --prune: only show what would go.
    """
    from embark.store import find_run

    console = (output or OutputOptions()).console()
    if verify + prune + (diff is not None) > 1:
        raise UserError("--verify, --prune and --diff are three questions", fix="ask one at a time")
    if (yes or dry_run) and not prune:
        raise UserError("--yes and --dry-run are for --prune", fix="add --prune, or leave them out")
    from embark.cli import checkpoints as verb

    found = find_run(run)
    if diff is not None:
        return verb.diff(console, found, *diff)
    if prune:
        return verb.clear(console, found, is_sure=yes, dry_run=dry_run)
    return verb.check(console, found) if verify else verb.show(console, found)


data = App(name="data", help="Prepare, make, check and copy what models learn from.", help_format="plaintext")
app.command(data)


@data.command
def prepare(
    spec: Spec,
    /,
    *,
    set_: Settings = (),
    dry_run: Flag = False,
    fresh: Flag = False,
    output: OutputOptions | None = None,
) -> int:
    """Turn the files of [data.prepare] into prepared data at data.path.

    What the spec does not say of the columns is guessed; --dry-run shows how. A preparation that was stopped goes on.

    Parameters
    ----------
    dry_run
        Only show what each column is taken for and why, and the memory it will take.
    fresh
        Begin anew, whatever is at data.path already.
    """
    from embark.cli.data_output import prepare_data
    from embark.spec import load_spec

    console = (output or OutputOptions()).console()
    return prepare_data(console, load_spec(spec, set_), spec, dry_run=dry_run, fresh=fresh)


@data.command
def make(
    spec: Spec,
    /,
    *,
    set_: Settings = (),
    out: str = "",
    force: Flag = False,
    output: OutputOptions | None = None,
) -> int:
    """Write the synthetic samples of a spec as prepared data: any size, any skew, one id or many.

    Parameters
    ----------
    out
        The folder to write; data.path where it is not given.
    force
        Replace the prepared data that is there.
    """
    from embark.cli.data_output import make_data
    from embark.spec import load_spec

    console = (output or OutputOptions()).console()
    return make_data(console, load_spec(spec, set_), out, force=force)


@data.command
def check(place: str, /, *, output: OutputOptions | None = None) -> int:
    """Read prepared data through: is it whole, is every value in range, does a column give the label away.

    Exit code 1 if something is wrong. Hints change nothing.

    Parameters
    ----------
    place
        A folder or a uri of prepared data, or a spec that names it.
    """
    from embark.cli.data_output import check_data

    return check_data((output or OutputOptions()).console(), place)


@data.command
def copy(
    source: str,
    target: str,
    /,
    *,
    verify: Flag = False,
    dry_run: Flag = False,
    force: Flag = False,
    output: OutputOptions | None = None,
) -> int:
    """Copy data between this machine and s3://, gs://, az://. A copy that was stopped goes on.

    Parameters
    ----------
    source
        A folder, a file or a uri. What is below it goes to the same paths below TARGET.
    target
        A folder or a uri.
    verify
        Read everything back and compare checksums; prepared data that comes here is always so compared.
    dry_run
        Only show what would be copied.
    force
        Replace what is at TARGET already.
    """
    from embark.cli.data_copy import copy as copy_data

    console = (output or OutputOptions()).console()
    return copy_data(console, source, target, verify=verify, dry_run=dry_run, force=force)


app.command(plan)
app.command(render)
app.command(lint)
app.command(rehearse)
app.command(launch)
app.command(status)
app.command(logs)
app.command(cancel)
app.command(diagnose)
app.command(cost)
app.command(watch)
app.command(report)
app.command(compare)
app.command(catalog)


@app.command
def bench(
    spec: Spec = "quickstart",
    /,
    *,
    set_: Settings = (),
    seconds: float = 8.0,
    peers: Annotated[bool, Parameter(negative="--no-peers")] = True,
    profile: Flag = False,
    calibrate: Flag = False,
    output: OutputOptions | None = None,
) -> int:
    """Train a spec's first batches here by Embark and by stock TorchRec, and compare: samples a second, side by side.

    With place.device=jax it is JAX's trainer alone that is measured.

    Parameters
    ----------
    seconds
        How long to measure each contender.
    peers
        Measure stock TorchRec too, in fp32 and in bf16 autocast.
    profile
        Show instead where the time of Embark's own step goes.
    calibrate
        Measure instead what this machine moves, computes and holds, and keep it for embark plan: some minutes.
    """
    from embark.cli.bench import compare, measure_in_jax, show_profile
    from embark.cli.calibrate import calibrate as calibrate_here
    from embark.spec import load_spec
    from embark.stack.versions import require_stack
    from embark.trainers.jax.packages import require_jax, wants_jax

    console = (output or OutputOptions()).console()
    run = load_spec(spec, set_)
    if seconds <= 0:
        raise UserError(f"--seconds {seconds:g} is no time", fix="--seconds 8")
    if profile and calibrate:
        raise UserError("--profile and --calibrate are two questions", fix="ask one at a time")
    if wants_jax(run):
        if profile or calibrate:
            raise UserError("--profile and --calibrate are of the torch trainer", fix="leave place.device=jax out")
        require_jax(run)
        return measure_in_jax(console, run, seconds=seconds)
    require_stack()
    if calibrate:
        return calibrate_here(console, run, seconds=seconds)
    return show_profile(console, run) if profile else compare(console, run, seconds=seconds, peers=peers)


app.command(doctor)


@app.command
def completion(shell: Literal["bash", "zsh", "fish"], /, *, output: OutputOptions | None = None) -> int:
    """Print a script that completes verbs and flags: `source <(embark completion bash)`."""
    (output or OutputOptions()).console().raw(app.generate_completion(shell=shell))
    return ExitCode.DONE
