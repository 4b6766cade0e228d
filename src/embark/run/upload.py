"""Uploads a remote run's events every minute: a machine that is preempted takes its local files with it."""

from __future__ import annotations

import threading
from types import TracebackType

from embark.errors import EmbarkError
from embark.store import RunDir

EVERY_S = 60.0
BYTES_PER_S = 1e6
"""A long run's file is uploaded less often: it goes as a whole each time."""
JOIN_S = 20.0


class EventUploader:
    """Uploads in a thread while it is entered. For a run on a local disk it does nothing."""

    def __init__(self, run_dir: RunDir, *, is_on: bool = True, every_s: float = EVERY_S) -> None:
        self._run_dir = run_dir
        self._every_s = every_s
        self._num_uploaded = 0
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="embark-upload", daemon=True)
        self._is_on = is_on and run_dir.is_remote

    def __enter__(self) -> EventUploader:
        if self._is_on:
            self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        """Wait for an upload under way, so that it cannot overwrite the run's last."""
        if self._is_on:
            self._is_over.set()
            self._thread.join(JOIN_S)

    def _run(self) -> None:
        while not self._is_over.wait(max(self._every_s, self._num_uploaded / BYTES_PER_S)):
            try:
                text = self._run_dir.events.read_bytes()
                if len(text) > self._num_uploaded:
                    self._run_dir.store.write("events.jsonl", text[: text.rfind(b"\n") + 1])
                    self._num_uploaded = len(text)
            except (EmbarkError, OSError):  # the next save says what is wrong with the store
                continue
