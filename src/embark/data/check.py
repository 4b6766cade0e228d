"""`embark data check`: is prepared data what its manifest says, and does a column give the label away."""

import hashlib
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from embark.data.leaks import LEAK_AUC
from embark.data.prepare.tasks import differences
from embark.data.prepared import SPLITS, STATISTICS, Block, Manifest, Part
from embark.data.prepared.cache import local_folder, read_manifest
from embark.data.progress import OnProgress, ProgressReporter
from embark.data.statistics import ColumnScore, compute_statistics, equal_columns
from embark.data.workers import num_cores
from embark.events.plotting import BARS
from embark.features.arrays import Bytes, Mask
from embark.formatting import shortlist
from embark.store import ObjectStore, open_store
from embark.store.object_store import for_each_parallel

CHECK_BYTES = 2_000_000_000  # Memory that counting may take.
NEW_SHARE = 0.5  # Share of held-out ids never seen in training; above this the column teaches little.
TOLERANCE = 1e-6
_PIECE_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class Problem:
    where: str  # A file, or a column.
    what: str


@dataclass(frozen=True, slots=True)
class Report:
    """The result of `embark data check` for prepared data."""

    path: str
    manifest: Manifest
    statistics: dict[str, Any] = field(default_factory=dict)
    scores: dict[str, ColumnScore] = field(default_factory=dict)
    problems: tuple[Problem, ...] = ()  # Problems that make the data unusable.
    hints: tuple[Problem, ...] = ()  # Oddities that a person may want to look at.
    is_local: bool = True  # Hints are computed for local data only.

    def columns(self) -> list[dict[str, Any]]:
        """Return a row for each column; none if the statistics are missing."""
        return column_rows(self.manifest, self.statistics, self.scores) if self.statistics else []

    def to_dict(self) -> dict[str, Any]:
        return {
            "path": self.path, "rows": self.manifest.rows_by_split, "size_bytes": self.manifest.size_bytes,
            "label_rate": self.statistics.get("label_rate"), "problems": self.problems, "hints": self.hints,
            "columns": self.columns(), "time_split": self.manifest.time_split,
        }


def check(path: str, *, memory_bytes: int = CHECK_BYTES, num_workers: int = 0,
          on_progress: OnProgress | None = None) -> Report:
    """Read every byte of prepared data, in a folder or an object store; hints need a folder."""
    manifest, store, directory = read_manifest(path), open_store(path), local_folder(path)
    progress, workers = ProgressReporter(on_progress), num_workers or num_cores()
    sizes = {entry.path: entry.size_bytes for entry in store.list()}
    problems = _check_parts(store, directory, manifest, sizes, workers, progress)
    problems += _id_map_problems(store, manifest, sizes)
    text = store.read(STATISTICS) if STATISTICS in sizes else None
    if directory is None or problems:
        problems += _statistics_problems(manifest, text)
        statistics: dict[str, Any] = json.loads(text) if text and not problems else {}
        return Report(path, manifest, statistics, problems=tuple(problems), is_local=directory is not None)
    statistics, scores = compute_statistics(directory, manifest, memory_bytes=memory_bytes, num_workers=workers,
                                            progress=progress, with_scores=True)
    problems += _statistics_problems(manifest, text, statistics)
    hints = [*_hints(statistics, scores), *_equal(directory, manifest), *_unlisted(set(sizes), manifest)]
    return Report(path, manifest, statistics, scores, tuple(problems), tuple(hints))


def _id_map_problems(store: ObjectStore, manifest: Manifest, sizes: Mapping[str, int]) -> Iterator[Problem]:
    """Compare the id maps with the checksums in the manifest."""
    maps = manifest.settings.get("id_maps")
    for about in maps.values() if isinstance(maps, dict) else ():
        files = [str(about.get(key, "")) for key in ("keys", "ids")] if isinstance(about, dict) else []
        digests = {file: hashlib.sha256(store.read(file)).digest() for file in files if file in sizes}
        yield from (Problem(file, "is missing") for file in files if file and file not in digests)
        if all(file in digests for file in files) and files \
                and hashlib.sha256(digests[files[0]] + digests[files[1]]).hexdigest() != about.get("sha256"):
            yield Problem(files[1], f"it and {files[0]} are not the id map whose checksum the manifest has")


def _statistics_problems(
    manifest: Manifest, text: bytes | None, counted: dict[str, Any] | None = None
) -> Iterator[Problem]:
    """Compare `statistics.json` with the manifest's checksum, and with what was counted again."""
    if text is None:
        if manifest.statistics_sha256:
            yield Problem(STATISTICS, "is missing, but the manifest has its checksum")
        return
    if hashlib.sha256(text).hexdigest() != manifest.statistics_sha256:
        yield Problem(STATISTICS, "its checksum is not the manifest's: it was damaged or replaced")
    elif counted is not None:
        wrong = differences(json.loads(text), json.loads(json.dumps(counted)), is_same=_is_close)
        if wrong:
            yield Problem(STATISTICS, f"{wrong[0][0]} is not what the rows give")


def _check_parts(
    store: ObjectStore, directory: Path | None, manifest: Manifest, sizes: Mapping[str, int], num_workers: int,
    progress: ProgressReporter,
) -> list[Problem]:
    problems: list[Problem] = []
    progress.begin("reading", manifest.size_bytes)

    def check_one(part: Part) -> None:
        size_bytes = sizes.get(part.file)
        if size_bytes != part.size_bytes:
            what = "is missing" if size_bytes is None else f"has {size_bytes:,} bytes"
            problems.append(Problem(part.file, f"{what}, the manifest says {part.size_bytes:,} bytes"))
            return
        if directory is None:
            data = np.frombuffer(store.read(part.file), np.uint8)
        else:
            data = np.memmap(directory / part.file, np.uint8, "r") if size_bytes else np.zeros(0, np.uint8)
        problems.extend(check_part(manifest, part, data, progress.advance))

    # Hashing and numpy's reductions let other threads run; of a store, only a few parts are in memory at a time.
    for_each_parallel(check_one, list(manifest.all_parts()), num_workers if directory else min(4, num_workers))
    return sorted(problems, key=lambda problem: problem.where)


def check_part(
    manifest: Manifest, part: Part, data: Bytes, report: Callable[[int], None] | None = None
) -> list[Problem]:
    """Find errors in the bytes of a part."""
    problems, digest = [], hashlib.sha256()
    for start in range(0, len(data), _PIECE_BYTES):
        piece = data[start : start + _PIECE_BYTES]
        digest.update(np.ascontiguousarray(piece).data)
        if report:
            report(len(piece))
    if digest.hexdigest() != part.sha256:
        problems.append(Problem(part.file, "its checksum is not the manifest's: it was damaged or replaced"))
    num_blocks = -(-part.rows // manifest.block_rows)
    starts: Sequence[int] = part.block_starts
    if manifest.layout.is_fixed:
        size_bytes = manifest.layout.map(manifest.block_rows).size_bytes
        starts = tuple(size_bytes * i for i in range(num_blocks))
    if len(starts) != num_blocks:
        return [*problems, Problem(part.file, f"has {num_blocks} blocks, the manifest gives {len(starts)}")]
    faults = _Faults(part)
    for i, (start, stop) in enumerate(zip(starts, (*starts[1:], part.size_bytes), strict=True)):
        first_row = i * manifest.block_rows
        block = _block(manifest, data[max(start, 0) : stop], min(manifest.block_rows, part.rows - first_row))
        if block is None:
            problems.append(Problem(part.file, f"the block of row {first_row:,} is not as long as its rows"))
        else:
            _check_values(block, first_row, faults)
    return problems + faults.problems()


class _Faults:
    """Values out of range, by column."""

    def __init__(self, part: Part) -> None:
        self._part = part
        self._seen: dict[tuple[str, str], tuple[int, int]] = {}

    def add(self, column: str, what: str, is_bad: Mask, first_row: int) -> None:
        """Count the bad values of a block; `is_bad` is [n] or [n, …]."""
        if is_bad.any():
            row = first_row + int(is_bad.reshape(-1).argmax()) // (is_bad.size // len(is_bad))
            self.add_num(column, what, int(is_bad.sum()), row)

    def add_num(self, column: str, what: str, num: int, row: int) -> None:
        before, first = self._seen.get((column, what), (0, row))
        self._seen[column, what] = before + num, first

    def problems(self) -> list[Problem]:
        return [
            Problem(column, f"{what}: {num:,}, the first in row {row:,} of {self._part.file}")
            for (column, what), (num, row) in self._seen.items()
        ]


def _block(manifest: Manifest, data: Bytes, num_rows: int) -> Block | None:
    """Return None if the bytes are not a block of `num_rows` rows."""
    layout = manifest.layout
    if len(data) < 8 * len(layout.ragged):
        return None
    counts = [int(c) for c in np.ascontiguousarray(data[: 8 * len(layout.ragged)]).view("<i8")]
    limits = [num_rows * layout.features[i].multi_hot for i in layout.ragged]
    if any(not 0 <= count <= limit for count, limit in zip(counts, limits, strict=True)):
        return None
    return Block.of(layout, data, num_rows) if layout.map(num_rows, counts).size_bytes == len(data) else None


def _check_values(block: Block, first: int, faults: _Faults) -> None:
    layout = block.layout
    faults.add("label", "labels that are neither 0 nor 1", block.label > 1, first)
    for i, name in enumerate(layout.labels):
        faults.add(name, "labels that are infinite", np.isinf(block.labels[:, i]), first)
    if layout.dense and not np.isfinite(block.dense).all():
        for i, name in enumerate(layout.dense):
            faults.add(name, "values that are not finite", ~np.isfinite(block.dense[:, i]), first)
    for i, feature in enumerate(layout.features):
        ids, lengths = block.ids(i), block.lengths(i)
        if lengths is not None:
            faults.add(feature.name, f"rows of more than {feature.multi_hot} ids", lengths > feature.multi_hot, first)
            if int(lengths.sum(dtype="i8")) != len(ids):
                faults.add_num(feature.name, "blocks whose lengths are not those of its ids", 1, first)
                continue
        if feature.weights_of:
            of = [one.name for one in layout.features].index(feature.weights_of)
            differs = np.asarray(lengths != block.lengths(of))
            faults.add(feature.name, f"rows of another number of weights than {feature.weights_of} has ids", differs,
                       first)
            rows = np.repeat(np.arange(len(block.label)), np.asarray(lengths))[~((ids >= 0) & np.isfinite(ids))]
            faults.add(feature.name, "rows with a weight that is negative or not finite",
                       np.bincount(rows, minlength=len(block.label)) > 0, first)
            continue
        if ids.size and (int(ids.max()) >= feature.rows or int(ids.min()) < 0):
            is_bad, what = (ids >= feature.rows) | (ids < 0), f"ids outside 0 to {feature.rows - 1:,}"
            if lengths is None:
                faults.add(feature.name, what, is_bad, first)
            else:
                row = int(np.searchsorted(np.cumsum(lengths), int(is_bad.argmax()), side="right"))
                faults.add_num(feature.name, what, int(is_bad.sum()), first + row)


def _hints(statistics: dict[str, Any], scores: dict[str, ColumnScore]) -> Iterator[Problem]:
    rate = statistics["label_rate"]["train"]
    if rate is None:
        yield Problem("train", "has no rows, so there is nothing to learn")
        return
    if rate in (0, 1) and "labels" not in statistics:
        yield Problem("label", f"is {rate:g} in every training row, so there is nothing to learn")
    for name, column in statistics["dense"].items():
        if column.get("min") is not None and column["min"] == column["max"]:
            yield Problem(name, f"is {column['min']:g} in every training row, so nothing can be learned from it")
    for name, column in statistics["sparse"].items():
        if column["num_used"] <= 1:
            yield Problem(name, "has one id in every training row, so nothing can be learned from it")
    for name, found in scores.items():
        if found.auc is not None and found.auc >= LEAK_AUC:
            what = "is the label, or derived from it" if found.auc > 0.9999 else "may be known only after the label"
            yield Problem(name, f"alone predicts the label, with AUC {found.auc:.4f} on held-out rows: it {what}")
        if found.new_share is not None and found.new_share > NEW_SHARE:
            yield Problem(name, f"{found.new_share:.0%} of the held-out ids are in no training row")


def _equal(directory: Path, manifest: Manifest) -> Iterator[Problem]:
    for first, *others in equal_columns(directory, manifest):
        yield Problem(first, f"holds the same as {', '.join(others)} in every row that was compared")


def _unlisted(found: set[str], manifest: Manifest) -> Iterator[Problem]:
    """Find part files that the manifest does not name."""
    listed = {part.file for part in manifest.all_parts()}
    others = sorted(path for path in found - listed if path.startswith(SPLITS) and path.endswith((".bin", ".part")))
    if others:
        yield Problem(shortlist(others, 1), "not in the manifest: an interrupted writer left it; it may be removed")


def _is_close(a: Any, b: Any) -> bool:
    if isinstance(a, int | float) and isinstance(b, int | float):
        return math.isclose(a, b, rel_tol=TOLERANCE, abs_tol=TOLERANCE)
    return bool(a == b)


def column_rows(
    manifest: Manifest, statistics: Mapping[str, Any], scores: Mapping[str, ColumnScore]
) -> list[dict[str, Any]]:
    """Return a row for each column: what it is, how it spreads, how well it alone predicts the label."""
    rows = [_dense_row(name, statistics["dense"].get(name, {})) for name in manifest.layout.dense]
    for feature in manifest.layout.id_features:
        kind = "list" if feature.is_ragged else "ids" if feature.multi_hot == 1 else f"{feature.multi_hot} ids"
        rows.append(_sparse_row(feature.name, kind, statistics["sparse"].get(feature.name, {})))
    for row in rows:
        found = scores.get(row["column"], ColumnScore(None))
        row |= {"new": _percent(found.new_share), "auc_alone": None if found.auc is None else round(found.auc, 3)}
    return rows


def bars(values: Sequence[float]) -> str:
    """Draw a bar for each value, the largest at full height; a positive value is always visible."""
    most = max(values, default=0)
    if most <= 0:
        return ""
    return "".join(BARS[0] if v <= 0 else BARS[max(1, round(v / most * (len(BARS) - 1)))] for v in values)


def _dense_row(name: str, column: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "column": name, "kind": "dense", "rows": None, "used": None, "top": None,
        "missing": _percent(column.get("zero_share")), "label_rate": None,
        "range": f"{column['min']:.4g} … {column['max']:.4g}" if column.get("min") is not None else None,
        "picture": bars(column.get("histogram", ())),
    }


def _sparse_row(name: str, kind: str, column: Mapping[str, Any]) -> dict[str, Any]:
    rates = [top["label_rate"] for top in column.get("top", ())]
    shares = column.get("top_share", {})
    lengths = column.get("lengths")
    return {
        "column": name, "kind": kind, "rows": column.get("rows"), "used": column.get("num_used"),
        "top": _percent(shares.get("1")), "missing": _percent(column.get("id_0_share")),
        "label_rate": f"{min(rates):.3f} … {max(rates):.3f}" if rates else None,
        "range": f"{lengths['min']} … {lengths['max']} ids, mean {lengths['mean']:.1f}" if lengths else None,
        "picture": bars(_by_rank(shares)),
    }


def _by_rank(shares: Mapping[str, float]) -> list[float]:
    """Return the share of lookups of the first id, of the second, of the third to the fifth, …"""
    before, found = 0.0, []
    for share in shares.values():
        found.append(share - before)
        before = share
    return found


def _percent(share: float | None) -> str | None:
    if share is None:
        return None
    return f"{share:.1%}" if share >= 0.0005 or not share else "< 0.1%"
