"""`embark train` and `embark follow`: train a spec on this machine, on data or on a stream."""

from contextlib import ExitStack
from typing import TYPE_CHECKING

from embark.errors import ExitCode, Interrupted, UserError
from embark.events.events import Event
from embark.store import RunDir, write_atomic
from .console import Accepted, Console, Flag, Settings, Spec

if TYPE_CHECKING:
    from embark.spec import RunSpec


def train(
    spec: Spec, /, *, set_: Settings = (), fresh: Flag = False, accept_change: Accepted = (),
    console: Console = Console()
) -> int:
    """Train a spec on this machine: on the CPU, on one GPU, as a rank under torchrun, or in JAX on TPUs.

    A stopped run resumes from its last checkpoint; a finished run is not repeated. With --json: one event per line.

    Parameters
    ----------
    fresh
        Start in a new directory (NAME-2, NAME-3, …) even if the run exists.
    """
    from embark.spec import accepting, load_spec

    return train_here(accepting(load_spec(spec, set_), accept_change), console, fresh=fresh)


def follow(
    spec: Spec, /, *, set_: Settings = (), fresh: Flag = False, accept_change: Accepted = (),
    make_streams: Flag = False, console: Console = Console()
) -> int:
    """Train on a spec's [stream] until it is stopped: NATS JetStream, Kafka, a folder that grows, your own code.

    A stopped run resumes behind its last checkpoint, no record is trained on twice. With --json: one event per line.

    Parameters
    ----------
    fresh
        Start in a new directory (NAME-2, NAME-3, …) even if the run exists.
    make_streams
        With NATS: first make a JetStream stream of stream.retention_hours for each of stream.topics that has none.
    """
    from embark.spec import accepting, load_spec

    run = accepting(load_spec(spec, set_), accept_change)
    if not run.stream.is_on:
        raise UserError(f"{spec}: stream.source is empty, so there is nothing to follow",
                        "set it in [stream] (docs/guides/follow.md); `embark train` trains on the data")
    if make_streams:
        from embark.data.stream.open_reader import make_streams as make

        for name in make(run):
            console.text(f"made the NATS stream {name}")
    return train_here(run, console, fresh=fresh)


def train_here(run: "RunSpec", console: Console, *, fresh: bool) -> int:
    """Run the process of a run, from its first signal to its exit code."""
    from embark.run.signals import StopSignals

    # A preemption can come while torch or jax is loaded.
    with StopSignals(is_loading=True) as signals, ExitStack() as at_end:
        from embark.trainers import begin, finished_result, open_backend, wants_jax

        view = console.view()
        sinks = [ReportAtEnd(), view]
        if not fresh and finished_result(run, sinks) is not None:
            return ExitCode.DONE
        from embark.run.open_run import RunOpener

        opener = RunOpener(signals, sinks, at_end)
        begin(run, opener, fresh=fresh)
        with console.waiting(f"loading {'JAX' if wants_jax(run) else 'PyTorch'}"):
            from embark.run.loop import train as train_with

            backend = open_backend(run)
        try:
            train_with(run, backend, sinks, fresh=fresh, opener=opener)
        except Interrupted as stopped:
            if not console.has_shown_end(view):
                raise
            return stopped.exit_code
    return ExitCode.DONE


MAX_QUICK_BYTES = 6_000_000  # At the end of a run, a report about more events would keep its user waiting.


class ReportAtEnd:
    """A sink that writes the report when a run ends. Whatever goes wrong here does not affect the run."""

    def __init__(self) -> None:
        self._run: RunDir | None = None
        self._is_written = False

    def emit(self, event: Event) -> None:
        if event.kind == "start":
            self._run = RunDir(str(event.values.get("run_dir", "")))
            self._is_written = False
        elif event.kind == "end":
            self.close()

    def close(self) -> None:
        """Write the report also for a run that fails without an `end` event."""
        if self._run is None or self._is_written:
            return
        self._is_written = True
        try:
            if self._run.events.stat().st_size <= MAX_QUICK_BYTES:
                # Imported here: the first step does not wait for it.
                from embark.report.context import read_run
                from embark.report.document import html_page
                from embark.report.report import NAME, report
                from embark.report.run_files import RunFiles

                context = read_run(RunFiles(self._run.path), lambda _: None, is_brief=True)
                # The report of a remote run is uploaded with the other small files.
                write_atomic(self._run.path / NAME, html_page(report(context)))
        except Exception:  # a report is not worth a run
            return
