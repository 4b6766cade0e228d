"""Polls `current.json` of an exported model: loads what it names beside the version that answers, and switches.

A delta is written into the tables of the version that answered before this one, which no request uses any more. Both
map the same file, so that only the pages with changed rows are twice in memory. On a GPU both have their tables there,
and the rows of a delta alone are uploaded.
"""

import logging
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, Protocol, TypeVar

from embark.errors import DataError, EmbarkError, Fault
from embark.export.artifact import (
    CURRENT,
    VersionId,
    current,
    current_version,
    fetch_version,
    make_room,
    open_artifact,
    open_versions,
    remove_fetched,
)
from embark.spec.serve import ScoringDevice
from .request_rows import RequestScorer
from .retrieve import open_retriever
from .served_model import VersionChange

Loaded = TypeVar("Loaded")
MAX_RETRY_S = 300.0
_STOP_S = 5.0  # Longest wait at the end; then loading of a version is abandoned.
_log = logging.getLogger("embark.serve")


def load_first(
    uri: str, version: int | None, load: Callable[[int | None], Loaded],
) -> tuple[Loaded, VersionChange | None]:
    """Load a version, by default the current one; if that is damaged, the newest earlier one that is not, with the
    reason."""
    try:
        make_room(uri, version)
        return load(version), None
    except DataError as error:
        if version is not None:
            raise
        versions = open_versions(uri)
        try:
            wanted: int | None = current_version(versions)
        except DataError:  # `current.json` is what is damaged
            wanted = None
        for number in sorted((one.step for one in versions.committed()), reverse=True):
            if wanted is not None and number >= wanted:
                continue
            try:
                make_room(uri, number)
                return load(number), VersionChange(wanted, number, error.what, error.fix)
            except DataError as other:
                _log.warning("version %d cannot be served either: %s", number, other.what)
        raise


def load_scorer(
    uri: str, version: int | VersionId | None, onto: RequestScorer | None = None, *, model_file: str = "",
    device: ScoringDevice | None = None,
) -> RequestScorer:
    """Load a version and warm it up; unless it was fetched before, it is fetched. `onto` is a version that nobody uses
    any more: if this one is a delta of it, its tables are reused."""
    from embark.trainers.torch.scoring.open_model import open_model

    if not isinstance(version, VersionId) or not version.chain:
        version = fetch_version(uri, version, onto.artifact.identity if onto else "")
    artifact = open_artifact(uri, version, onto.artifact if onto else None)
    model = open_model(artifact, model_file, device or ScoringDevice(), onto.model if onto else None)
    scorer = RequestScorer(artifact, model.score, model.device, model.score_numbers)
    scorer.model = model
    scorer.score([scorer.empty_request()])
    scorer.retriever = open_retriever(scorer, model.user_vectors)
    return scorer


class PolledModel(Protocol):
    """A model that is kept at the current version, in this process or in several."""

    current: int | None
    refused: VersionChange | None

    @property
    def version(self) -> int:
        """The active version."""

    @property
    def identity(self) -> str:
        """The identity of the active version."""

    @property
    def folders(self) -> set[Path]:
        """The folders of the active version."""

    def set_state(self, current: int | None, refused: VersionChange | None) -> None:
        """Set the version in `current.json`, and why it does not answer; listeners hear of a new reason."""

    def prepare(self, wanted: VersionId) -> None:
        """Load a version beside the active one, and check it. Raises if it is rejected."""

    def switch(self) -> set[Path]:
        """Answer with the prepared version. Return the folders of this version and of the one before."""

    def discard(self) -> None:
        """Forget the prepared version."""


class VersionPoller:
    """Keeps `model` at the current version. A rejected version is tried again at growing intervals."""

    def __init__(self, uri: str, model: PolledModel, poll_s: float,
                 lock: AbstractContextManager[Any] | None = None) -> None:
        """Create the poller. It holds `lock` while it looks for and loads a version."""
        self._lock = lock or threading.RLock()
        self._versions, self._model, self._poll_s = open_versions(uri), model, poll_s
        self._stopping = threading.Event()
        self._retry_s, self._retry_from_s = poll_s, 0.0

    @contextmanager
    def running(self) -> Iterator[None]:
        """Poll in a thread while the block runs; not at all with an interval of 0."""
        if not self._poll_s:
            yield
            return
        thread = threading.Thread(target=self._run, name="embark-poll", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._stopping.set()
            thread.join(_STOP_S)

    def _run(self) -> None:
        # Replicas that were started together do not fetch a new version together.
        while not self._stopping.wait(random.uniform(0.5, 1.5) * self._poll_s):
            with self._lock:
                self.poll()

    def poll(self) -> None:
        """Switch to the current version, unless it is active already or was rejected."""
        wanted = None
        try:
            while not self._is_active(wanted := self._current()):
                refused = self._model.refused
                if refused and refused.is_of(wanted) and time.monotonic() < self._retry_from_s:
                    return
                make_room(self._versions.store.uri, wanted, self._model.folders)
                self._model.prepare(wanted)
                if self._stopping.is_set() or self._current() != wanted:  # it may have changed again meanwhile
                    self._model.discard()
                else:
                    keep = self._model.switch()
                    self._retry_s = self._poll_s
                    remove_fetched(self._versions, keep)  # A rollback needs the one before.
                if self._stopping.is_set():
                    return
            self._model.set_state(self._model.current, None)
        except Exception as error:
            if not isinstance(error, EmbarkError):
                _log.exception("version %s cannot be loaded", wanted and wanted.version)
            self._refuse(wanted, error)

    def _is_active(self, wanted: VersionId) -> bool:
        """Tell whether the active version has this content; the number decides if the content cannot be read."""
        return wanted.version == self._model.version and wanted.identity in ("", self._model.identity)

    def _current(self) -> VersionId:
        number = None
        try:
            found = current(self._versions)
            if found.text is None and found.version not in (0, self._model.version):  # the newest may be a rejected one
                raise DataError(f"{self._versions.store.where(CURRENT)} is gone",
                                f"`embark rollback {self._versions.store.uri} VERSION` writes it again")
            number = found.version
        finally:
            self._model.set_state(number, self._model.refused)
        return VersionId(found.version, found.identity)

    def _refuse(self, wanted: VersionId | None, error: Exception) -> None:
        """Report a rejected version, once for the same reason."""
        before = self._model.refused
        known = error if isinstance(error, EmbarkError) else Fault("internal error", "see the log")
        change = VersionChange(wanted and wanted.version, self._model.version, known.what, known.fix,
                               wanted.identity if wanted else "")
        is_retry = before is not None and before.is_of(wanted)
        self._retry_s = min(2 * self._retry_s, MAX_RETRY_S) if is_retry else self._poll_s
        self._retry_from_s = time.monotonic() + self._retry_s
        self._model.set_state(self._model.current, change)
