"""Reports as files: beside the run, where a person wants them, and at the end of training."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from embark.errors import UserError
from embark.events.events import Event
from embark.report.context import RunContext, read_run
from embark.report.document import Document
from embark.report.html_page import GENERATOR, html_page
from embark.report.markdown_page import markdown_page
from embark.report.report import report
from embark.report.run_files import RunFiles
from embark.report.status import State
from embark.store import RunDir, open_store, write_atomic

NAME = "report.html"
MAX_QUICK_BYTES = 6_000_000
"""Of events: at the end of a run, a report about more would keep its user waiting."""
_HEAD_BYTES = 4096


@dataclass(frozen=True, slots=True)
class WrittenReport:
    """Where the report of a run is, and what it says in short."""

    run: str
    report: str
    markdown: str | None
    state: State
    sentence: str
    steps: int
    eval: Mapping[str, Any]
    held_s: float


def write_report(context: RunContext, document: Document, *, out: str = "", markdown: bool = False) -> WrittenReport:
    """Write the report of a run to a file or URI, by default into the run's directory."""
    target = out or f"{context.uri.rstrip('/')}/{NAME}"
    beside = f"{target.removesuffix('.html').removesuffix('.htm')}.md"
    record = context.record
    return WrittenReport(
        run=context.uri, report=write_page(target, html_page(document)),
        markdown=write_page(beside, markdown_page(document)) if markdown else None, state=context.status.state,
        sentence=document.sentence, steps=record.steps_done, eval=record.eval, held_s=record.held_s)


def write_page(target: str, text: str) -> str:
    """To a URI, or to a file; a file that is not a report is never overwritten."""
    if "://" in target and not target.startswith("file://"):
        folder, _, name = target.rpartition("/")
        open_store(folder).write(name, text.encode())
        return target
    path = Path(target.removeprefix("file://")).expanduser()
    if path.is_dir():
        raise UserError(f"{path} is a directory", fix=f"--out {path / NAME}")
    try:
        if path.is_file() and path.stat().st_size:
            with path.open("rb") as file:
                if GENERATOR.encode() not in file.read(_HEAD_BYTES):
                    raise UserError(f"{path} exists and is not a report of Embark",
                                    fix="name another file, or remove it first")
        write_atomic(path, text)
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}", fix="--out FILE writes elsewhere") from error
    return str(path)


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
        """A run that fails may have no `end` event."""
        if self._run is None or self._is_written:
            return
        self._is_written = True
        try:
            if self._run.events.stat().st_size <= MAX_QUICK_BYTES:
                context = read_run(RunFiles(self._run.path), lambda _: None, is_brief=True)
                # The report of a remote run is uploaded with the other small files.
                write_atomic(self._run.path / NAME, html_page(report(context)))
        except Exception:  # a report is not worth a run
            return
