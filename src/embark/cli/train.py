"""`embark train`: train a spec on this machine."""

from typing import TYPE_CHECKING

from embark.cli.console import Console
from embark.cli.options import Accepted, Flag, Settings, Spec
from embark.errors import ExitCode, Interrupted

if TYPE_CHECKING:
    from embark.spec import RunSpec


def train(
    spec: Spec, /, *, set_: Settings = (), fresh: Flag = False, accept_change: Accepted = (),
    console: Console = Console(),
) -> int:
    """Train a spec on this machine: on the CPU, on one GPU, as a rank under torchrun, or in JAX on TPUs.

    A stopped run resumes from its last checkpoint; a finished run is not repeated. With --json: one event per line.

    Parameters
    ----------
    fresh
        Start in a new directory (NAME-2, NAME-3, …) even if the run exists.
    """
    from embark.spec import load_spec
    from embark.spec.run import accepting

    return train_here(accepting(load_spec(spec, set_), accept_change), console, fresh=fresh)


def train_here(run: "RunSpec", console: Console, *, fresh: bool) -> int:
    """The process of a run, from its first signal to its exit code."""
    from embark.run.signals import StopSignals

    with StopSignals(is_loading=True) as signals:  # a preemption can come while torch or jax is loaded
        from embark.report.report_at_end import ReportAtEnd
        from embark.trainers import finished_result, open_backend, wants_jax

        view = console.view()
        sinks = [ReportAtEnd(), view]
        if not fresh and finished_result(run, sinks) is not None:
            return ExitCode.DONE
        with console.waiting(f"loading {'JAX' if wants_jax(run) else 'PyTorch'}"):
            from embark.run.loop import train as train_with

            backend = open_backend(run)
        try:
            train_with(run, backend, sinks, fresh=fresh, signals=signals)
        except Interrupted as stopped:
            if not console.has_shown_end(view):
                raise
            return stopped.exit_code
    return ExitCode.DONE
