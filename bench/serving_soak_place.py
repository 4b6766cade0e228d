"""What the soak of serving compares with: runs whose scores are known, and a place whose versions are watched."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from exported_runs import EditedRun, save_run
from numpy.typing import NDArray
from soak_comparison import Difference

from embark.export.artifact import ID_MAPS, WEIGHTS, current_version, open_versions, read_gate
from embark.export.delta import TENSOR_FILES, identity_of
from embark.serve.request_rows import JsonColumns
from embark.serve.version_poller import load_scorer
from embark.store import Checkpoint, open_store
from embark.trainers import export_run

NUM_IDS, NUM_ROWS, NUM_BLOCKS = 1_000, 1_000, 3
TOLERANCE = 1e-6  # Of docs/guides/export.md: requests may be scored in batches of another size.
LAX = tuple(f"publish.{name}=1e12" for name in (
    "max_auc_drop", "max_loss_increase", "max_calibration_error", "max_auc_shift", "max_psi"))
STRICT = ("publish.max_calibration_error=0", "publish.max_auc_drop=0", "publish.max_loss_increase=0")


def block(number: int) -> list[dict[str, Any]]:
    """Rows of a request: every id of both tables is in each."""
    return [{"dense_0": ((i + number) % 97) / 50 - 1, "dense_1": ((7 * i + number) % 89) / 40 - 1,
             "a": (i + 311 * number) % NUM_IDS, "b": (i + number) % 3} for i in range(NUM_ROWS)]


BLOCKS = [block(number) for number in range(NUM_BLOCKS)]
BODIES = [json.dumps({"rows": rows}).encode() for rows in BLOCKS]


def key_of(version: Checkpoint) -> str:
    """What a version holds, by the checksums that a full export of it has."""
    files = {name: mark.sha256 for name, mark in version.files.items()}
    files |= {name: mark[1] for name, mark in version.values.get(TENSOR_FILES, {}).items()}
    return f"{files.get(WEIGHTS, '')[:16]}-{files.get(ID_MAPS, '')[:16]}"


@dataclass(frozen=True)
class Held:
    """A version that is or was current."""

    number: int
    key: str
    identity: str = ""


class Scores:
    """The scores of everything that was ever trained, each by a full export of its own that nothing disturbs."""

    def __init__(self, folder: Path, tables: str) -> None:
        self._folder, self._tables = folder / "scores", tables
        self._by_key: dict[str, tuple[str, list[NDArray[np.float64]]]] = {}

    def add(self, run: str, step: int | None = None) -> str:
        """Score the rows by a checkpoint, and return its key."""
        made = export_run(run, str(self._folder), tables=self._tables, step=step)  # type: ignore[arg-type]
        (version,) = [one for one in open_versions(str(self._folder)).committed() if one.step == made.version]
        key = key_of(version)
        if key not in self._by_key:
            scorer = load_scorer(str(self._folder), made.version)
            found = scorer.score([JsonColumns(rows) for rows in BLOCKS])
            blocks = [np.array(one.scores) for one in found]  # type: ignore[union-attr]
            if any((np.abs(one - blocks[0]) <= 10 * TOLERANCE).all() for _, (one, *_) in self._by_key.values()):
                raise ValueError(f"{run}, step {made.step}: scores as another checkpoint, so nothing can be told")
            self._by_key[key] = f"{Path(run).name}, step {made.step}", blocks
        shutil.rmtree(self._folder)
        return key

    def about(self, key: str) -> str:
        return self._by_key[key][0] if key in self._by_key else f"unknown ({key})"

    def num_wrong(self, key: str, number: int, found: NDArray[np.float64]) -> int:
        """Rows of a block that a version of this key would give another score."""
        if key not in self._by_key:
            raise Difference(f"a version holds what nobody trained: {key}")
        expected = self._by_key[key][1][number]
        return int((~(np.abs(found - expected) <= TOLERANCE)).sum())

    def matching(self, number: int, found: NDArray[np.float64]) -> str:
        return ", ".join(about for about, blocks in self._by_key.values()
                         if (np.abs(found - blocks[number]) <= TOLERANCE).all()) or "nothing that was trained"


class SoakRun(EditedRun):
    """A run whose checkpoints are drawn, and whose scores are known before anybody exports them."""

    def __init__(self, folder: Path, name: str, seed: int, scores: Scores) -> None:
        super().__init__(folder, seed, rows=NUM_IDS, name=name)
        self.uri, self.scores, self.key = f"{folder}/runs/{name}", scores, ""
        self.weights = self._drawn()

    def _drawn(self) -> dict[str, Any]:
        """Weights that give scores far from 0 and 1."""
        return {name: 0.3 * self.rng.normal(size=values.shape).astype(np.float32)
                for name, values in self.weights.items()}

    def save_next(self, num_rows: int = 60) -> str:
        """Save a checkpoint with other rows and another dense network, and return what a version of it holds."""
        for name, drawn in self._drawn().items():
            if name.startswith("model.dense."):
                self.weights[name] = drawn
            else:
                rows = self.rng.integers(len(drawn), size=num_rows)
                self.weights[name] = self.weights[name].copy()
                self.weights[name][rows] = drawn[rows]
        self.step += 1
        save_run(self.spec, step=self.step, weights=self.weights)
        self.key = self.scores.add(self.uri)
        return self.key

    def train_anew(self, seed: int) -> str:
        """Train the run again under its name, up to the same step, to other weights."""
        shutil.rmtree(self.uri)
        self.rng, self.step = np.random.default_rng(seed), self.step - 1
        self.weights = self._drawn()
        return self.save_next()


@dataclass
class Place:
    """A folder or a prefix of a bucket with versions, and what was ever current there."""

    uri: str
    scores: Scores
    history: list[Held] = field(default_factory=list)
    numbers: dict[int, str] = field(default_factory=dict)
    """Since the place was wiped: what each number was given to."""
    num_changes: int = 0
    settled: list[tuple[float, int]] = field(default_factory=lambda: [(0.0, 0)])
    """Instants at which the server was known to answer with an entry of the history."""

    def look(self) -> Held:
        """Read the place. Numbers must name what they named, and what is current must be known and not refused."""
        versions = open_versions(self.uri)
        committed = {one.step: one for one in versions.committed()}
        for number, one in committed.items():
            key = key_of(one)
            if self.numbers.setdefault(number, key) != key:
                raise Difference(f"number {number} was {self.scores.about(self.numbers[number])}, and is "
                                 f"{self.scores.about(key)} now, in a place that was not wiped")
        current = current_version(versions)
        if current not in committed:
            raise Difference(f"version {current} is current and is not there: {sorted(committed)}")
        held = Held(current, key_of(committed[current]), identity_of(committed[current]))
        self.note(held)
        return held

    def note(self, held: Held) -> None:
        if not self.history or self.history[-1] != held:
            self.num_changes += 1
            self.history.append(held)

    def numbers_there(self) -> list[int]:
        return [one.step for one in open_versions(self.uri).committed()]

    def refused(self, number: int) -> bool:
        return not (read_gate(open_versions(self.uri), number) or {}).get("passed", True)

    def allowed(self, since_s: float) -> list[Held]:
        """What may answer a request that was sent then."""
        first = max(index for instant_s, index in self.settled if instant_s <= since_s)
        return self.history[first:]

    def settle(self) -> None:
        self.settled.append((time.monotonic(), len(self.history) - 1))

    def wipe(self) -> None:
        """Remove everything, as `rm -rf` does; numbers begin again."""
        self.remove("")
        self.numbers.clear()

    def remove(self, prefix: str) -> None:
        if "://" in self.uri:
            above, _, name = self.uri.rpartition("/")
            open_store(above).delete_prefix(f"{name}/{prefix}".rstrip("/"))
        else:
            shutil.rmtree(Path(self.uri) / prefix, ignore_errors=True)

    def damage(self, path: str, change: Callable[[bytes], bytes]) -> None:
        """Change the bytes of a file in place, as `cp` or a shell's `>` does: to the same inode."""
        store = open_store(self.uri)
        data = change(store.read(path))
        if "://" in self.uri:
            store.write(path, data)
        else:
            (Path(self.uri) / path).write_bytes(data)

    def files(self, number: int) -> Sequence[str]:
        return [one.path for one in open_store(self.uri).list(f"version-{number:09d}/")]

