"""`embark report` and `embark compare`: one HTML file about a run, and runs side by side."""

import tempfile
import webbrowser
from dataclasses import replace
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from embark.report.compare import Comparison, compare_document, compare_runs, results_table, spec_table
from embark.report.context import read_run
from embark.report.document import html_page
from embark.report.report import NAME, WrittenReport, write_page, write_report
from embark.report.report import report as report_of
from .console import Console

Out = Annotated[str, Parameter(allow_leading_hyphen=True, show_default=False)]


def report(
    run: str, /, *, out: Out = "",
    open_: Annotated[bool, Parameter(name="--open", negative="", show_default=False)] = False,
    console: Console = Console()
) -> None:
    """Write one self-contained HTML file about a run, finished or not.

    It shows the spec, the machines, curves, costs, predictions, interruptions and a diagnosis.

    Parameters
    ----------
    run
        A run's directory, its name under ./runs, or its URI.
    out
        The file or URI to write, by default report.html in the run's directory; - for standard output.
    open_
        Open it in the browser.
    """
    context = read_run(run, console.warning)
    document = report_of(context)
    if out == "-":
        console.file(html_page(document))
        return
    written = write_report(context, document, out=out)
    console.show(written, _render)
    if open_:
        path = Path(written.report)
        if "://" in written.report:
            path = Path(tempfile.mkdtemp(prefix="embark-report-")) / NAME
            path.write_text(html_page(document), encoding="utf-8")
        if not webbrowser.open(path.resolve().as_uri()):
            console.warning(f"no browser could be started here; open {path} yourself")


def _render(console: Console, written: WrittenReport) -> None:
    console.text(written.sentence)
    console.result(f"wrote {written.report}")


def compare(*runs: str, out: Out = "", console: Console = Console()) -> None:
    """Compare runs: differences between their specs, results, and which was better.

    Parameters
    ----------
    runs
        Two runs or more: directories, names under ./runs, or URIs.
    out
        Also write an HTML file with the curves overlaid; - for standard output.
    """
    found = compare_runs([read_run(run, console.warning, is_brief=True) for run in runs])
    if out == "-":
        console.file(html_page(compare_document(found)))
        return
    written = write_page(out, html_page(compare_document(found))) if out else None
    console.show(replace(found, report=written), _render_comparison)


def _render_comparison(console: Console, found: Comparison) -> None:
    if not console.quiet:
        _render_tables(console, found)
    console.result(found.sentence)
    if found.report:
        console.text(f"wrote {found.report}")


def _render_tables(console: Console, found: Comparison) -> None:
    if not found.spec:
        console.text("The specs differ only in their names.")
    for title, table in (("Differences between the specs", spec_table(found)), ("Results", results_table(found))):
        if table.rows:
            console.table([dict(zip(table.columns, row, strict=True)) for row in table.rows], title=title)
            console.text("")
    for run in found.runs:
        console.text(f"{run.name}: {run.sentence}", style="dim")
