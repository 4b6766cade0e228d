"""`embark publish`: checkpoints of a run as versions that pass the gate."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from embark.cli.check import render_verdict
from embark.cli.console import Console
from embark.cli.options import Flag, Settings
from embark.errors import EmbarkError, ExitCode
from embark.formatting import format_bytes

if TYPE_CHECKING:
    from embark.publish.publisher import PublishResult


def publish(
    run: str, /, *, to: str = "", watch: Flag = False,
    gate: Annotated[bool, Parameter(negative="--no-gate", show_default=False)] = True, set_: Settings = (),
    console: Console = Console(),
) -> ExitCode:
    """Publish a run's newest checkpoint: export it as a delta, measure it, and make it current if it passes the gate.

    [publish] in its spec has the place and the gate's bounds. A refused version is kept and not served: exit code 1.

    Parameters
    ----------
    run
        A run's directory, its name under ./runs, or its URI.
    to
        A folder, or an s3://, gs:// or az:// URI; default: publish.to, or RUN/export.
    watch
        Publish each checkpoint that the run saves, at most one in publish.every_minutes, until Ctrl-C.
    gate
        --no-gate publishes without measuring.
    """
    from embark.publish import publisher

    if not watch:
        with console.waiting("publishing"):
            result = publisher.publish(run, to=to, gate=gate, sets=set_)
        console.show(result, _render)
        return ExitCode.OTHER if result.refused else ExitCode.DONE
    from embark.run.signals import StopSignals

    def report(error: EmbarkError) -> None:
        console.warning(f"{error.what} ({error.fix})" if error.fix else error.what)

    with StopSignals() as signals:
        publisher.watch(run, to=to, gate=gate, sets=set_, on_result=lambda result: console.show(result, _render),
                        on_error=report, is_stopped=lambda: bool(signals.look()))
    return ExitCode.DONE


def _render(console: Console, result: PublishResult) -> None:
    size = f"{format_bytes(result.num_bytes)}, " + (f"a delta of version {result.parent}" if result.parent else "full")
    if not result.is_new:
        console.result(f"{result.uri}: step {result.step:,} is version {result.version} already, "
                       + (f"refused: {result.refused}" if result.refused else
                          "which is current" if result.is_current else "which is not current"))
        return
    console.result(f"{result.uri}: version {result.version} ({result.run}, step {result.step:,}; {size}) is "
                   + (f"refused: {result.refused}" if result.refused else "now current"))
    if result.verdict:
        render_verdict(console, result.verdict)
    if result.refused:
        console.text(f"Publish it nevertheless: embark rollback {result.uri} {result.version}")
