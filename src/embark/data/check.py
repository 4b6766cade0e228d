"""`embark data check`: is prepared data what its manifest says, and does a column give the answer away."""

from __future__ import annotations

import hashlib
import json
import math
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from embark.data.blocks import open_part
from embark.data.check_part import Problem, check_part
from embark.data.leaks import Alone, equal_columns
from embark.data.prepare.pieces import Progress
from embark.data.prepared import SPLITS, STATISTICS, Manifest, Part
from embark.data.processes import num_cores
from embark.data.statistics import survey
from embark.errors import DataError

LEAK_AUC = 0.9
"""A column that alone reaches this is nearly the label: on real clicks no single one comes near, and no model."""
NEW_SHARE = 0.5
"""Of the held-out ids, those never seen in training; above this the column teaches little."""
TOLERANCE = 1e-6

Tell = Callable[[Progress], None]


@dataclass(frozen=True, slots=True)
class Report:
    """What was found."""

    manifest: Manifest
    statistics: dict[str, Any] = field(default_factory=dict)
    alone: dict[str, Alone] = field(default_factory=dict)
    problems: tuple[Problem, ...] = ()
    """What makes the data unfit."""
    hints: tuple[Problem, ...] = ()
    """What a person may want to look at."""


def check(
    directory: Path, manifest: Manifest, *, memory_bytes: int, num_workers: int = 0, tell: Tell | None = None
) -> Report:
    """Read every byte of a folder of prepared data."""
    workers = num_workers or num_cores()
    problems = list(_check_parts(directory, manifest, workers, tell))
    if problems:
        return Report(manifest, problems=tuple(problems))
    statistics, alone = survey(directory, manifest, memory_bytes=memory_bytes, num_workers=workers, tell=tell,
                               has_alone=True)
    path = directory / STATISTICS
    text = path.read_bytes() if path.is_file() else None
    problems += statistics_problems(manifest, text, statistics)
    hints = [*_hints(statistics, alone), *_equal(directory, manifest), *_strangers(directory, manifest)]
    return Report(manifest, statistics, alone, tuple(problems), tuple(hints))


def statistics_problems(
    manifest: Manifest, text: bytes | None, counted: dict[str, Any] | None = None
) -> Iterator[Problem]:
    """Whether `statistics.json` is the manifest's, and, where they were counted again, says the same."""
    if text is None:
        if manifest.statistics_sha256:
            yield Problem(STATISTICS, "is missing, but the manifest has its checksum")
        return
    if hashlib.sha256(text).hexdigest() != manifest.statistics_sha256:
        yield Problem(STATISTICS, "its checksum is not the manifest's: it was damaged or replaced")
    elif counted is not None:
        where = _difference(json.loads(text), json.loads(json.dumps(counted)))
        if where:
            yield Problem(STATISTICS, f"{where} is not what the rows give")


def each_part(manifest: Manifest) -> Iterator[Part]:
    """Of all splits."""
    for split in SPLITS:
        yield from manifest.parts.get(split, ())


class Reading:
    """Tells of bytes that several threads read."""

    def __init__(self, manifest: Manifest, tell: Tell | None) -> None:
        self._total = manifest.size_bytes
        self._tell, self._done, self._began_s = tell, 0, time.monotonic()
        self._lock = threading.Lock()

    def __call__(self, num_bytes: int) -> None:
        with self._lock:
            self._done += num_bytes
            if self._tell:
                elapsed_s = time.monotonic() - self._began_s
                left_s = elapsed_s * (self._total - self._done) / max(self._done, 1)
                self._tell(Progress("reading", self._done, self._total, 0, elapsed_s, left_s))


def _check_parts(directory: Path, manifest: Manifest, num_workers: int, tell: Tell | None) -> list[Problem]:
    reading = Reading(manifest, tell)

    def look(part: Part) -> list[Problem]:
        try:
            data = open_part(directory, part)
        except DataError as error:
            return [Problem(part.file, error.what.removeprefix(f"{directory / part.file}: "))]
        return check_part(manifest, part, data, reading)

    # Hashing and numpy's reductions let other threads run.
    with ThreadPoolExecutor(num_workers) as pool:
        return [problem for found in pool.map(look, each_part(manifest)) for problem in found]


def _hints(statistics: dict[str, Any], alone: dict[str, Alone]) -> Iterator[Problem]:
    rate = statistics["label_rate"]["train"]
    if rate in (0, 1):
        yield Problem("label", f"is {rate:g} in every training row, so there is nothing to learn")
    for name, told in statistics["dense"].items():
        if told.get("min") is not None and told["min"] == told["max"]:
            yield Problem(name, f"is {told['min']:g} in every training row, so it tells nothing")
    for name, told in statistics["sparse"].items():
        if told["num_used"] <= 1:
            yield Problem(name, "has one id in every training row, so it tells nothing")
    for name, found in alone.items():
        if found.auc is not None and found.auc >= LEAK_AUC:
            what = "is the label, or made of it" if found.auc > 0.9999 else "may be known only after the label"
            yield Problem(name, f"tells the label alone, with AUC {found.auc:.4f} on held-out rows: it {what}")
        if found.new_share is not None and found.new_share > NEW_SHARE:
            yield Problem(name, f"{found.new_share:.0%} of the held-out ids are in no training row")


def _equal(directory: Path, manifest: Manifest) -> Iterator[Problem]:
    for first, *others in equal_columns(directory, manifest):
        yield Problem(first, f"holds the same as {', '.join(others)} in every row that was compared")


def _strangers(directory: Path, manifest: Manifest) -> Iterator[Problem]:
    """Part files that the manifest does not name."""
    listed = {part.file for part in each_part(manifest)}
    found = sorted(
        path.relative_to(directory).as_posix()
        for split in SPLITS for path in (*(directory / split).glob("**/*.bin"), *(directory / split).glob("**/*.part"))
    )
    strangers = [name for name in found if name not in listed]
    if strangers:
        more = f" and {len(strangers) - 1} more" if len(strangers) > 1 else ""
        yield Problem(strangers[0] + more, "not of this data set: what an interrupted writer left may be removed")


def _difference(a: Any, b: Any, where: str = "") -> str:
    """The first place at which the two differ by more than a rounding."""
    if isinstance(a, dict) and isinstance(b, dict):
        for key in dict.fromkeys([*a, *b]):
            found = _difference(a.get(key), b.get(key), f"{where}.{key}" if where else str(key))
            if found:
                return found
        return ""
    if isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
        return next(filter(None, (_difference(x, y, where) for x, y in zip(a, b, strict=True))), "")
    if isinstance(a, int | float) and isinstance(b, int | float):
        return "" if math.isclose(a, b, rel_tol=TOLERANCE, abs_tol=TOLERANCE) else where
    return "" if a == b else where
