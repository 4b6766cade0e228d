"""`embark data check`: is prepared data what its manifest says, and does a column give the label away."""

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from embark.features.arrays import Array, Bytes
from embark.formatting import shortlist
from embark.spec import resolve
from embark.store import ObjectStore, for_each_parallel, open_store
from .column_report import Column, Problem, Report, column_hints, describe_columns, unseen_ids
from .prepared import SPLITS, Block, Manifest, Part
from .prepared.cache import local_folder, open_prepared, read_manifest
from .prepared.manifest import SEQUENCES, resolve_from_manifest
from .progress import OnProgress, ProgressReporter
from .workers import num_cores

_PIECE_BYTES = 4 << 20


def check(path: str, *, on_progress: OnProgress | None = None) -> Report:
    """Read every byte of prepared data, in a folder or an object store; hints need a folder."""
    manifest, store, directory = read_manifest(path), open_store(path), local_folder(path)
    sizes = {entry.path: entry.size_bytes for entry in store.list()}
    problems = _check_parts(store, directory, manifest, sizes, ProgressReporter(on_progress))
    problems += _id_map_problems(store, manifest, sizes)
    report = Report(path, manifest.rows_by_split, tuple(problems), size_bytes=manifest.size_bytes,
                    time_split=manifest.time_split)
    if problems:
        return report
    if directory is None:
        far = Problem(path, "its columns were not looked at; `embark data copy` it to this machine and check the copy")
        return replace(report, hints=(far,))
    columns = tuple(_columns(path, manifest))
    if SEQUENCES in manifest.settings:  # of users, who have no label
        return replace(report, columns=tuple(one for one in columns if one.column == manifest.layout.features[0].name))
    hints = [*column_hints(columns), *unseen_ids(directory, manifest), *_unlisted(set(sizes), manifest)]
    if not manifest.num_rows("train"):
        hints.append(Problem("train", "has no rows, so there is nothing to learn"))
    return replace(report, columns=columns, hints=tuple(hints))


def _columns(path: str, manifest: Manifest) -> Iterator[Column]:
    split = "validation" if manifest.num_rows("validation") else "test"
    spec = resolve({"data": {"kind": "prepared", "path": path, "eval_split": split, "shuffle": "none"}})
    spec = resolve_from_manifest(spec, manifest)
    return describe_columns(open_prepared(spec), spec)


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


def _check_parts(
    store: ObjectStore, directory: Path | None, manifest: Manifest, sizes: Mapping[str, int],
    progress: ProgressReporter
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
            try:
                data = np.memmap(directory / part.file, np.uint8, "r") if size_bytes else np.zeros(0, np.uint8)
            except OSError as error:
                problems.append(Problem(part.file, f"cannot be read: {error.strerror or error}"))
                return
        problems.extend(_check_part(manifest, part, data, progress.advance))

    # Hashing and numpy's reductions let other threads run; of a store, only a few parts are in memory at a time.
    for_each_parallel(check_one, list(manifest.all_parts()), num_cores() if directory else min(4, num_cores()))
    return sorted(problems, key=lambda problem: problem.where)


def _check_part(manifest: Manifest, part: Part, data: Bytes, report: Callable[[int], None]) -> list[Problem]:
    """Find errors in the bytes of a part."""
    problems, digest = [], hashlib.sha256()
    for start in range(0, len(data), _PIECE_BYTES):
        piece = data[start : start + _PIECE_BYTES]
        digest.update(np.ascontiguousarray(piece).data)
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

    def add(self, column: str, what: str, bad: Array, first_row: int) -> None:
        """Count the bad values of a block: `bad` is [n] or [n, …], marks or numbers of them."""
        if bad.any():
            per_row = bad.reshape(len(bad), -1).sum(axis=1)
            num, row = self._seen.get((column, what), (0, first_row + int((per_row > 0).argmax())))
            self._seen[column, what] = num + int(per_row.sum()), row

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
                faults.add(feature.name, "blocks whose lengths are not those of its ids", np.ones(1, bool), first)
                continue
        what = f"ids outside 0 to {feature.rows - 1:,}"
        is_bad: Array = (ids >= feature.rows) | (ids < 0)
        if feature.weights_of:
            of = [one.name for one in layout.features].index(feature.weights_of)
            faults.add(feature.name, f"rows of another number of weights than {feature.weights_of} has ids",
                       np.asarray(lengths != block.lengths(of)), first)
            what, is_bad = "weights that are negative or not finite", ~((ids >= 0) & np.isfinite(ids))
        if lengths is not None:
            rows = np.repeat(np.arange(len(block.label)), lengths)[is_bad]
            is_bad = np.bincount(rows, minlength=len(block.label))
        faults.add(feature.name, what, is_bad, first)


def _unlisted(found: set[str], manifest: Manifest) -> Iterator[Problem]:
    """Find part files that the manifest does not name."""
    listed = {part.file for part in manifest.all_parts()}
    others = sorted(path for path in found - listed if path.startswith(SPLITS) and path.endswith((".bin", ".part")))
    if others:
        yield Problem(shortlist(others, 1), "not in the manifest: an interrupted writer left it; it may be removed")
