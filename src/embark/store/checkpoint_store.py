"""The checkpoints of a run. One without its mark does not exist; the mark is written last and says what must be there.

    step-000001000/rank-00000-00.bin …   each rank's shards
    step-000001000/index.json            which tensor is where in them
    step-000001000/spec.toml, plan.txt   what was run, and how it was laid out
    step-000001000/commit.json           the mark: every file with its size and checksum, and what the run knew
"""

import hashlib
import json
import math
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import Literal

from embark.errors import DataError, UserError
from embark.spec import StoreSpec
from embark.values import JsonMap, frozen
from .errors import NotFound
from .object_store import Entries, ObjectStore, Piece, for_each_parallel, normalize_path

COMMIT_FILE = "commit.json"
NUM_READERS = 4  # Files that are looked at side by side.
EARLY_STOPPING = "early_stopping"  # Key of a commit record: the state of early stopping, with the best step so far.
Reason = Literal["newest", "every", "best"]


@frozen
class FileChecksum:
    """Size and checksum that a file must have."""

    size_bytes: int
    sha256: str


@frozen
class Checkpoint:
    """A committed checkpoint."""

    step: int
    files: Mapping[str, FileChecksum]
    values: JsonMap  # Entries of its commit record: time, world size, last evaluation.
    kind: str = "step"

    @property
    def name(self) -> str:
        return checkpoint_name(self.step, self.kind)

    @property
    def array_files(self) -> list[str]:
        """Files that loading needs: all but the texts."""
        return [name for name in self.files if name not in self.text_files]

    @property
    def text_files(self) -> list[str]:
        return [name for name in self.files if name.endswith((".toml", ".txt"))]

    @property
    def num_bytes(self) -> int:
        return sum(mark.size_bytes for mark in self.files.values())


@frozen
class CheckpointStore:
    """The checkpoints of a run or, with another `kind` than `step`, numbered folders of that name that are committed in
    the same way, such as the versions of an exported model."""

    store: ObjectStore
    fence: Callable[[], None] = lambda: None
    """Raises where another process has taken the run over: then nothing is committed or removed."""
    kind: str = "step"

    def committed(self) -> list[Checkpoint]:
        """List the checkpoints whose mark can be read, oldest first."""
        return sorted((c for c in map(self._read, self._marked()) if c), key=lambda c: c.step)

    def unreadable(self) -> list[int]:
        """List the steps that were committed, but whose mark cannot be read, or whose folder is a link to nothing."""
        return sorted(_step_of(name) for name in self._marked() if not self._read(name))

    def find(self, step: int) -> Checkpoint | None:
        """Return the checkpoint of a step, if it was committed and its mark can be read."""
        return self._read(self._name(step))

    def begin(self, step: int) -> None:
        """Clear what an unfinished save left. Its mark goes first, so that it is none while the rest goes."""
        self.remove(step)

    def commit(self, step: int, files: Mapping[str, FileChecksum], values: JsonMap) -> None:
        """Make the checkpoint exist, after seeing that every file of every rank has arrived."""
        sizes = {e.path.removeprefix(f"{self._name(step)}/"): e.size_bytes for e in self._files(step)}
        absent = sorted(name for name, mark in files.items() if sizes.get(name) != mark.size_bytes)
        if absent:
            raise DataError(f"{self.store.where(self._name(step))}: {absent[0]} was written and is not there",
                            "ranks on several machines need a store.root that all of them share, or a uri")
        marks = {name: [mark.size_bytes, mark.sha256] for name, mark in sorted(files.items())}
        record = {self.kind: step, "time_s": round(time.time(), 3), **values, "files": marks}
        text = json.dumps(record, indent=1) + "\n"
        mark = f"{self._name(step)}/{COMMIT_FILE}"
        self.fence()
        # `begin` removed it. One that is there now may be the next holder's: a writer that was paused looks again.
        if not self.store.create(mark, text.encode()):
            self.fence()
            self.store.write(mark, text.encode())

    def damage(self, checkpoint: Checkpoint, part: int = 0, num_parts: int = 1) -> str:
        """Describe the first damage of its arrays; empty if there is none. Ranks share the work, some files each."""
        return next(iter(self.damages(checkpoint, checkpoint.array_files[part::num_parts])), "")

    def damages(
        self, checkpoint: Checkpoint, names: Sequence[str] | None = None, on_bytes: Callable[[int], None] | None = None
    ) -> list[str]:
        """Describe each file that is not what the mark says. `on_bytes` gets the bytes as they are read, from several
        threads."""
        looked_at = list(checkpoint.files) if names is None else names
        found: dict[str, str] = {}

        def look(name: str) -> None:
            found[name] = self._damage_of(f"{checkpoint.name}/{name}", checkpoint.files[name], on_bytes)

        for_each_parallel(look, looked_at, NUM_READERS)
        return [found[name] for name in looked_at if found[name]]

    def remove(self, step: int) -> None:
        """Delete the checkpoint of `step`."""
        self.fence()
        self.store.delete(f"{self._name(step)}/{COMMIT_FILE}")
        self.store.delete_prefix(self._name(step))

    def unfinished(self) -> list[int]:
        """List the steps whose save never ended: they have no mark."""
        names = {e.path.split("/")[0] for e in [*self.store.list(), *self.store.unfinished()]}
        return sorted(_step_of(name) for name in names - self._marked() if self._matches(name))

    def where(self, step: int) -> str:
        """Return the uri of a checkpoint, for messages."""
        return self.store.where(self._name(step))

    def _name(self, step: int) -> str:
        return checkpoint_name(step, self.kind)

    def _matches(self, name: str) -> bool:
        return bool(_numbered(self.kind).match(name))

    def _files(self, step: int) -> Entries:
        return self.store.list(self._name(step))

    def _marked(self) -> set[str]:
        """Return the names of steps with a mark. One that is no folder is a link to nothing: what it stands for is not
        known."""
        places = (e.path.split("/") for e in self.store.list())
        return {name for name, *rest in places if rest in ([], [COMMIT_FILE]) and self._matches(name)}

    def _read(self, name: str) -> Checkpoint | None:
        try:
            values = json.loads(self.store.read(f"{name}/{COMMIT_FILE}"))
            files = {normalize_path(n): FileChecksum(int(size), str(digest))
                     for n, (size, digest) in values.pop("files").items()}
            checkpoint = Checkpoint(int(values[self.kind]), files, values, self.kind)
            return checkpoint if files and checkpoint.name == name else None
        except (UserError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
            return None  # `UserError`: there is no mark, or it names a path outside of the folder

    def _damage_of(self, path: str, mark: FileChecksum, on_bytes: Callable[[int], None] | None) -> str:
        try:
            actual = self.store.size(path)
            if actual != mark.size_bytes:
                return f"{path}: {actual:,} bytes instead of {mark.size_bytes:,}"
            return "" if self.store.sha256(path, actual, on_bytes) == mark.sha256 else f"{path}: its bytes changed"
        except NotFound as error:  # an outage is none: it must not cost a checkpoint
            return f"{path}: {error.what}"


class ChecksumWriter:
    """Writes to a store and remembers the size and checksum of each file."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store
        self.marks: dict[str, FileChecksum] = {}

    def write(self, path: str, data: bytes | Iterable[Piece], size_bytes: int | None = None) -> None:
        digest, num_bytes = hashlib.sha256(), 0

        def counted() -> Iterator[Piece]:
            nonlocal num_bytes
            for piece in [data] if isinstance(data, bytes) else data:
                digest.update(piece)
                num_bytes += memoryview(piece).nbytes
                yield piece

        self._store.write(path, counted(), size_bytes)
        self.marks[path] = FileChecksum(num_bytes, digest.hexdigest())


def checkpoint_name(step: int, kind: str = "step") -> str:
    """Return the name of the folder of a step."""
    return f"{kind}-{step:09d}"


@cache
def _numbered(kind: str) -> re.Pattern[str]:
    return re.compile(rf"^{kind}-(\d{{9}}|[1-9]\d{{9,17}})$")  # The form of `checkpoint_name`, below 2^63.


CHECKPOINT_NAME = _numbered("step")
LOWER_IS_BETTER = ("log_loss", "normalized_entropy")  # Metrics of `store.best_by` that improve downward.


def _step_of(name: str) -> int:
    return int(name.rpartition("-")[2])


def reasons_by_spec(store: StoreSpec, checkpoints: Sequence[Checkpoint]) -> dict[int, tuple[Reason, ...]]:
    """Return why `[store]` and early stopping keep each checkpoint; one without a reason is removed."""
    reasons = reasons_to_keep(
        {c.step: metric_of(store, c) for c in checkpoints}, keep_last=store.keep_checkpoints,
        keep_every=store.keep_every, keep_best=store.keep_best,
        better="down" if store.best_by in LOWER_IS_BETTER else "up"
    )
    # That of each newest one: a run may resume from any of them, should those after it be damaged.
    best = {best_step_of(c) for c in checkpoints if "newest" in reasons[c.step]}
    return {step: (*why, "best") if step in best and "best" not in why else why for step, why in reasons.items()}


def best_step_of(checkpoint: Checkpoint) -> int | None:
    """Return the best step when the checkpoint was saved, if the run had early stopping."""
    state = checkpoint.values.get(EARLY_STOPPING)
    step = state.get("best_step") if isinstance(state, Mapping) else None
    return step if isinstance(step, int) and step > 0 else None


def metric_of(store: StoreSpec, checkpoint: Checkpoint) -> float | None:
    """Return the value of `best_by` at the last evaluation before the save."""
    evaluated = checkpoint.values.get("eval")
    value = evaluated.get(store.best_by) if isinstance(evaluated, dict) else None
    return float(value) if isinstance(value, int | float) else None


def reasons_to_keep(
    metrics: Mapping[int, float | None], *, keep_last: int, keep_every: int = 0, keep_best: int = 0,
    better: Literal["up", "down"] = "up"
) -> dict[int, tuple[Reason, ...]]:
    """Return which rules keep each step; `metrics` has the evaluation of each step that was evaluated. The newest is
    kept whatever the rules say: a run resumes from it, and `keep_last` counts it. `keep_every` keeps the multiples of
    so many steps, and `keep_best` so many with the best metric; of equal ones the newer, and never one that is not a
    finite number. 0 switches a rule off."""
    steps = sorted(metrics, reverse=True)
    kept: dict[Reason, set[int]] = {"newest": set(steps[:max(keep_last, 1)])}
    if keep_every > 0:
        kept["every"] = {step for step in steps if step % keep_every == 0}
    if keep_best > 0:
        sign = 1 if better == "up" else -1
        measured = [(sign * metric, step) for step, metric in metrics.items()
                    if metric is not None and math.isfinite(metric)]
        kept["best"] = {step for _, step in sorted(measured, reverse=True)[:keep_best]}
    return {step: tuple(reason for reason, those in kept.items() if step in those) for step in steps}
