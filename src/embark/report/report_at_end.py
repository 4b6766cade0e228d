"""The report that a run writes when it ends."""

from embark.events.events import Event
from embark.store import RunDir, write_atomic

MAX_QUICK_BYTES = 6_000_000  # Of events: at the end of a run, a report about more would keep its user waiting.


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
