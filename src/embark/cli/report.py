"""The words of `embark report` and `embark compare`; `report_verb` does what they say."""

from __future__ import annotations

from typing import Annotated

from cyclopts import Parameter

from embark.cli.console import Console
from embark.cli.options import Flag

Out = Annotated[str, Parameter(allow_leading_hyphen=True, show_default=False)]


def report(
    run: str,
    /,
    *,
    out: Out = "",
    markdown: Flag = False,
    open_: Annotated[bool, Parameter(name="--open", negative="", show_default=False)] = False,
    console: Console = Console(),
) -> int:
    """Write one HTML file about a run that is finished, running or dead: to keep, to send, to print.

    What was run and on what, how it went, what it cost, what was foretold, what it survived. It needs nothing else.

    Parameters
    ----------
    run
        A run's directory, its name under ./runs, or its uri.
    out
        The file or uri to write; report.html in the run's directory where it is not given, - for standard output.
    markdown
        Write the same as Markdown, too, beside it.
    open_
        Show it in the browser.
    """
    from embark.cli.report_output import report_run

    return report_run(console, run, out=out, markdown=markdown, is_shown=open_)


def compare(*runs: str, out: Out = "", console: Console = Console()) -> int:
    """Set runs side by side: what differs in their specs, how each ended, their curves, and which was better.

    Parameters
    ----------
    runs
        Two runs or more: directories, names under ./runs, or uris.
    out
        Write it as one HTML file, too, with the curves laid over each other; - for standard output.
    """
    from embark.cli.report_output import compare_runs

    return compare_runs(console, runs, out=out)
