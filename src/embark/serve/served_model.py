"""The version that answers, and what another one must show before it takes over."""

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from embark.errors import DataError, EmbarkError
from embark.export.artifact import Artifact, VersionId
from embark.formatting import pluralize
from embark.values import frozen
from .infer_protocol import metadata
from .request_rows import OnRows, RequestColumns, RequestScorer, Scores
from .retrieve import RetrieveRequest, RetrieveResponse

NUM_RECORDED, MAX_RECORDED_ROWS, RECORD_EVERY_S = 16, 1_024, 1.0  # Requests kept in memory, and their rows.


@frozen
class VersionChange:
    """Another version became current: it is active now, or it was rejected."""

    version: int | None  # None if the current version cannot be read.
    previous: int  # The version before, which keeps answering if the other one is rejected.
    refused: str = ""  # Why it was rejected; empty if it is active.
    fix: str = ""
    identity: str = ""  # Of `version`.

    def is_of(self, wanted: VersionId | None) -> bool:
        return (self.version, self.identity) == ((wanted.version, wanted.identity) if wanted else (None, ""))


class Load(Protocol):
    """Loads a version and scores something with it. A delta may use up the version that it is loaded onto."""

    def __call__(self, version: int | VersionId | None, onto: RequestScorer | None = None) -> RequestScorer: ...


class ServedModel:
    """Scores requests with one version until `switch`, and keeps a sample of them in memory."""

    def __init__(self, scorer: RequestScorer, name: str = "", load: Load | None = None) -> None:
        """`name` is what clients call the model; by default the name of its run. `load` loads other versions."""
        self.scorer, self._is_named, self._load = scorer, bool(name), load  # The scorer of the active version.
        self._prepared: RequestScorer | None = None
        self.previous: RequestScorer | None = None  # The version before this one; None if it cannot take a delta.
        self.name = name or _run_name(scorer.artifact)
        self.current: int | None = scorer.artifact.version  # The version in `current.json`, if it is polled.
        self.refused: VersionChange | None = None
        self.listeners: list[Callable[[VersionChange], None]] = []
        self._recorded: deque[tuple[RequestColumns, Scores]] = deque(maxlen=NUM_RECORDED)
        self._record_from_s = 0.0
        self._uses: Counter[int] = Counter()  # Batches in work, by the identity of the artifact.
        self._lock = threading.Lock()

    @contextmanager
    def _in_use(self) -> Iterator[RequestScorer]:
        """Hold the active scorer, even if another thread calls `switch` meanwhile."""
        with self._lock:
            scorer = self.scorer
            self._uses[id(scorer.artifact)] += 1
        try:
            yield scorer
        finally:
            with self._lock:
                self._uses[id(scorer.artifact)] -= 1

    def is_in_use(self, artifact: Artifact) -> bool:
        """Tell whether it is active, or a batch that began before the switch is not finished yet."""
        with self._lock:
            return artifact is self.scorer.artifact or self._uses[id(artifact)] > 0

    @property
    def artifact(self) -> Artifact:
        return self.scorer.artifact

    @property
    def version(self) -> int:
        return self.artifact.version

    @property
    def identity(self) -> str:
        return self.artifact.identity

    def score(self, requests: Sequence[RequestColumns]) -> list[Scores | EmbarkError]:
        """Return the scores of each request, all by the same version, or the error that it has instead."""
        with self._in_use() as scorer:
            found = scorer.score(requests)
        if time.monotonic() >= self._record_from_s:
            for rows, scores in zip(requests, found, strict=True):
                if isinstance(scores, Scores) and len(rows) <= MAX_RECORDED_ROWS:
                    self._recorded.append((rows, scores))
                    self._record_from_s = time.monotonic() + RECORD_EVERY_S
                    break
        return found

    @property
    def has_items(self) -> bool:
        """Whether the model retrieves items."""
        return self.scorer.retriever is not None

    def retrieve(self, requests: Sequence[RetrieveRequest]) -> list[RetrieveResponse | EmbarkError]:
        """Return the items of each request, by the towers and the index of one version."""
        with self._in_use() as scorer:
            assert scorer.retriever is not None
            return scorer.retriever.retrieve(requests)

    def observe(self, on_rows: OnRows) -> None:
        """Call `on_rows` with the rows of each batch from now on, whichever version scores them."""
        self.scorer.on_rows = on_rows

    def record_empty_request(self) -> None:
        """Record an empty request first, so that there is always one to check with."""
        self.score([self.scorer.empty_request()])

    def check(self, scorer: RequestScorer) -> None:
        """Raise unless the scorer is another version of the same model: the name, inputs and outputs are the same, and
        each recorded row that has a score has a finite one."""
        answering, other = self.artifact, scorer.artifact
        if not self._is_named and _run_name(other) != self.name:
            raise DataError(f"its run is called {_run_name(other)!r}, and the model that is served {self.name!r}",
                            f"embark serve --name {self.name} serves versions of runs of any name")
        if _signature(other) != _signature(answering):
            ours, theirs = _signature(answering), _signature(other)
            differing = next(one["name"] for one in theirs + ours if one not in ours or one not in theirs)
            raise DataError(f"it has other inputs or outputs than version {answering.version}, beginning with "
                            f"{differing!r}",
                            "export a model of the same columns, or serve this one from a URI of its own")
        if answering.info.item_index is not None and other.info.item_index is None:
            raise DataError(f"it is no retrieval model, unlike version {answering.version}: it has no item index",
                            "export it again, or serve it from a URI of its own")
        recorded = list(self._recorded.copy())
        answers = scorer.score([rows for rows, _ in recorded])
        num_lost, why = 0, ""
        for (rows, before), after in zip(recorded, answers, strict=True):
            lost = [after.what] * len(rows) if isinstance(after, EmbarkError) else \
                [reason for row, reason in after.errors if before.scores[row] is not None]
            num_lost, why = num_lost + len(lost), next(iter(lost), why)
        if num_lost:
            raise DataError(f"{pluralize(num_lost, 'recorded row')} that version {answering.version} gave a score got "
                            f"none: {why}", "score rows with it by `embark score --version`, and export another")

    def prepare(self, wanted: VersionId) -> None:
        """Load a version beside the active one, and check it. Raises if it is rejected."""
        previous, self.previous = self.previous, None  # where this fails half of a delta may be in its tables
        self._prepared = None
        assert self._load is not None
        scorer = self._load(wanted, None if previous is None or self.is_in_use(previous.artifact) else previous)
        self.check(scorer)
        self._prepared = scorer

    def discard(self) -> None:
        """Forget the prepared version."""
        self._prepared = None

    def switch(self) -> set[Path]:
        """Answer with the prepared version. Return the folders of this version and of the one before."""
        scorer, self._prepared, before = self._prepared, None, self.scorer
        assert scorer is not None
        self.answer_with(scorer)
        shares_files = scorer.artifact.folders[0] == before.artifact.folders[0]
        self.previous = before if scorer.artifact.deltas and shares_files else None
        return {*before.artifact.folders, *scorer.artifact.folders}

    def answer_with(self, scorer: RequestScorer) -> None:
        """Answer with the scorer from the next batch on, its towers and item index together."""
        change = VersionChange(scorer.artifact.version, self.artifact.version, identity=scorer.artifact.identity)
        scorer.on_rows = self.scorer.on_rows
        with self._lock:
            self._uses += Counter()  # drops zeros: an identity is used again once its artifact is gone
            self.scorer, self.refused = scorer, None
        self._report(change)

    @property
    def folders(self) -> set[Path]:
        """The folders of the active version."""
        return set(self.artifact.folders)

    def set_state(self, current: int | None, refused: VersionChange | None) -> None:
        """Set the version in `current.json`, and why it does not answer; listeners hear of a new reason."""
        before, self.current, self.refused = self.refused, current, refused
        if refused and refused != before:
            self._report(refused)

    def _report(self, change: VersionChange) -> None:
        for listener in self.listeners:
            listener(change)


def _run_name(artifact: Artifact) -> str:
    return artifact.info.run.rstrip("/").rpartition("/")[2]


def _signature(artifact: Artifact) -> list[dict[str, object]]:
    """Return what clients send and get, whatever the order of columns."""
    about = metadata("", 0, artifact.info.rows.columns, artifact.info.model)
    tensors: list[dict[str, object]] = sorted(about["inputs"], key=lambda tensor: str(tensor["name"]))
    return [*tensors, *about["outputs"]]
