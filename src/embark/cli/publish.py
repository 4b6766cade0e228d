"""`embark publish` and `embark rollback`: new versions of an exported model that pass the gate, and earlier ones."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from embark.errors import EmbarkError, ExitCode, UserError
from embark.formatting import MISSING, format_bytes, format_float, format_time
from .console import Console, Flag, OptionalInt, Settings

if TYPE_CHECKING:
    from embark.export.rollback import ExportedVersion, Rollback, VersionList
    from embark.publish.gate import GateVerdict
    from embark.publish.publisher import CheckResult, PublishResult


def publish(
    run: str, /, *, to: str = "", watch: Flag = False,
    gate: Annotated[bool, Parameter(negative="--no-gate", show_default=False)] = True, dry_run: Flag = False,
    set_: Settings = (), console: Console = Console()
) -> ExitCode:
    """Publish a run's newest checkpoint: export it as a delta, measure it, and make it current if it passes the gate.

    [publish] in its spec has the URI and the gate's bounds. A refused version is kept and not served: exit code 1.

    So is one during whose publication someone rolled back.

    Parameters
    ----------
    run
        A run's directory, its name under ./runs, or its URI; with --dry-run also RUN@best or RUN@STEP.
    to
        A folder, or an s3://, gs:// or az:// URI; default: publish.to, or RUN/export.
    watch
        Publish each checkpoint that the run saves, at most one in publish.every_minutes, until Ctrl-C.
    gate
        --no-gate publishes without measuring.
    dry_run
        Only measure the checkpoint, and say whether it would pass the gate: exit code 1 if it would not.
    """
    from embark.publish import publisher

    if dry_run:
        if watch or not gate:
            raise UserError("--dry-run measures one checkpoint", f"leave {'--watch' if watch else '--no-gate'} out")
        with console.waiting("measuring"):
            checked = publisher.check(run, to=to, sets=set_)
        console.show(checked, _render_checked)
        return ExitCode.DONE if checked.verdict.is_passed else ExitCode.OTHER
    if not watch:
        with console.waiting("publishing"):
            result = publisher.publish(run, to=to, gate=gate, sets=set_)
        console.show(result, _render)
        return ExitCode.OTHER if result.refused or result.not_current else ExitCode.DONE
    from embark.run.signals import StopSignals

    def report(error: EmbarkError) -> None:
        console.warning(f"{error.what} ({error.fix})" if error.fix else error.what)

    with StopSignals() as signals:
        publisher.watch(run, to=to, gate=gate, sets=set_, on_result=lambda result: console.show(result, _render),
                        on_error=report, is_stopped=lambda: bool(signals.look()))
    return ExitCode.DONE


def _render_checked(console: Console, result: CheckResult) -> None:
    verdict = result.verdict
    against = f"version {result.published} of {result.uri}" if result.published else \
        f"nothing: {result.uri} has no current version"
    console.result(f"{result.run}, step {result.step:,}: "
                   + ("passes the gate" if verdict.is_passed else f"refused: {verdict.why}")
                   + f"\ncompared with {against}; {verdict.rows}")
    _render_verdict(console, verdict)


def _render(console: Console, result: PublishResult) -> None:
    size = f"{format_bytes(result.num_bytes)}, " + (f"a delta of version {result.parent}" if result.parent else "full")
    if not result.is_new:
        console.result(f"{result.uri}: step {result.step:,} is version {result.version} already, "
                       + (f"refused: {result.refused}" if result.refused else
                          "which is current" if result.is_current else
                          f"which is not current{result.not_current and ': '}{result.not_current}"))
    else:
        console.result(f"{result.uri}: version {result.version} ({result.run}, step {result.step:,}; {size}) is "
                       + (f"refused: {result.refused}" if result.refused else
                          f"not made current: {result.not_current}" if result.not_current else "now current"))
    if result.verdict:
        _render_verdict(console, result.verdict)
    if not result.is_current:
        console.text(f"Publish it nevertheless: embark rollback {result.uri} {result.version}")


def _render_verdict(console: Console, verdict: GateVerdict) -> None:
    for note in verdict.notes:
        console.warning(note)
    console.table([{"AUC": MISSING if verdict.auc is None else format_float(verdict.auc),
                    "log loss": format_float(verdict.log_loss),
                    "calibration": MISSING if verdict.calibration is None else format_float(verdict.calibration),
                    "rows": verdict.num_samples, "tests": verdict.num_tests, "refuse": len(verdict.refusals)}])
    for test in verdict.refusals[:10]:
        console.text(f"  {test.name}: {test.sentence}")


def rollback(
    artifact: str, version: OptionalInt = None, /, *,
    list_: Annotated[bool, Parameter(name="--list", negative="", show_default=False)] = False,
    console: Console = Console()
) -> None:
    """Make an earlier version of an exported model the current one; running servers switch to it.

    Changes no version; `embark rollback ARTIFACT VERSION` also goes forward again. Does not need torch.

    Parameters
    ----------
    artifact
        Where `embark export` wrote to: a folder or a URI.
    version
        The version; default: the newest before the current one.
    list_
        List the versions and change nothing.
    """
    from embark.export import rollback as versions

    if not list_:
        console.show(versions.rollback(artifact, version), _render_rollback)
        return
    if version is not None:
        raise UserError("--list lists all versions", "leave VERSION or --list out")
    console.show(versions.list_versions(artifact), _render_list)


def _render_rollback(console: Console, result: Rollback) -> None:
    if result.version == result.previous:
        console.result(f"{result.uri}: version {result.version} is current already")
        return
    before = f" (was {result.previous})" if result.previous else ""
    console.result(f"{result.uri}: version {result.version} is now current{before}")
    console.text("Running servers switch at their next look, every --poll-s seconds."
                 + (f" Undo: embark rollback {result.uri} {result.previous}" if result.previous else ""))


def _render_list(console: Console, listed: VersionList) -> None:
    console.table([_row(one) for one in listed.versions], title=listed.uri)
    for one in listed.versions:
        if one.refused:
            console.text(f"version {one.version} was refused: {one.refused}")


def _row(one: ExportedVersion) -> dict[str, object]:
    from embark.export.artifact import short_identity

    when = format_time(one.time_s)
    return {"version": one.version, "current": "yes" if one.is_current else "", "exported": when, "run": one.run,
            "step": one.step, "tables": one.tables, "delta of": one.parent or "",
            "AUC": MISSING if one.auc is None else format_float(one.auc),
            "size": format_bytes(one.num_bytes), "identity": short_identity(one.identity)}
