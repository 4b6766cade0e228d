"""`embark check`: whether a run's checkpoint would pass the gate of its `[publish]`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from embark.cli.console import Console
from embark.cli.options import Settings
from embark.errors import ExitCode
from embark.formatting import MISSING, format_float

if TYPE_CHECKING:
    from embark.publish.gate import GateVerdict
    from embark.publish.publisher import CheckResult


def check(
    run: str, /, *, to: str = "", step: Annotated[int | None, Parameter(show_default=False)] = None,
    set_: Settings = (), console: Console = Console(),
) -> ExitCode:
    """Measure a run's newest checkpoint as `embark publish` would, and publish nothing: exit code 1 if it is refused.

    Its AUC, log loss and calibration against the published version's, on all rows and by slice, and the rows' drift.

    Parameters
    ----------
    run
        A run's directory, its name under ./runs, or its URI; RUN@best for its best checkpoint, RUN@STEP for a step's.
    to
        Where the versions are that it is compared with; default: publish.to, or RUN/export.
    step
        The checkpoint of this step.
    """
    from embark.publish import publisher

    with console.waiting("measuring"):
        result = publisher.check(run, to=to, step=step, sets=set_)
    console.show(result, _render)
    return ExitCode.DONE if result.verdict.is_passed else ExitCode.OTHER


def _render(console: Console, result: CheckResult) -> None:
    verdict = result.verdict
    against = f"version {result.published} of {result.uri}" if result.published else \
        f"nothing: {result.uri} has no current version"
    console.result(f"{result.run}, step {result.step:,}: "
                   + ("passes the gate" if verdict.is_passed else f"refused: {verdict.why}")
                   + f"\ncompared with {against}; {verdict.rows}")
    render_verdict(console, verdict)


def render_verdict(console: Console, verdict: GateVerdict) -> None:
    """The figures, and each test that refuses."""
    for note in verdict.notes:
        console.warning(note)
    console.table([{"auc": MISSING if verdict.auc is None else format_float(verdict.auc),
                    "log_loss": format_float(verdict.log_loss),
                    "calibration": MISSING if verdict.calibration is None else format_float(verdict.calibration),
                    "rows": verdict.num_samples, "tests": verdict.num_tests, "refused": len(verdict.refusals)}],
                  {"auc": "AUC", "log_loss": "log loss", "calibration": "calibration", "rows": "rows",
                   "tests": "tests", "refused": "refuse"})
    for test in verdict.refusals[:10]:
        console.text(f"  {test.name}: {test.sentence}")
