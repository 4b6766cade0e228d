"""`embark data prepare` on synthetic Criteo text under a memory cap, beside polars parsing the same file.

    python bench/prepare.py [--gb 10] [--memory-gb 2] [--ids hash] [--keep FOLDER] [--beside CHECKOUT [--turns 3]]

Polars only reads: 14 integers and 26 hexadecimal columns to integers, one aggregate a column so that nothing is
skipped, streaming, on all cores, by the fastest of several ways that are tried on a part of the file. Embark reads,
checks, splits, transforms, numbers ids, writes, hashes and counts. Both run in a process of their own, whose memory,
with that of all below it, is measured from outside. Polars is run before and after; its better time counts.

`--beside` compares this code with that of another commit, and with features of its own: in turns, the best of each.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from embark.data.progress import tree_bytes

# Rows per day, and how large and how often missing the fields are, follow day 0 of Criteo's 1TB set.
TABLE_ROWS = (40_000_000, 39_060, 17_295, 7_424, 20_265, 3, 7_122, 1_543, 63, 40_000_000, 3_067_956, 405_282, 10,
              2_209, 11_938, 155, 4, 976, 14, 40_000_000, 40_000_000, 40_000_000, 590_152, 12_973, 108, 36)
MISSING_IDS = (.03, 0, 0, 0, 0, 0, 0, 0, 0, .03, .03, 0, 0, .47, 0, .47, .47, 0, 0, .03, .03, .03, .47, 0, 0, 0)
MISSING_INTEGERS = (.24, .10, .25, .49, .47, .09, .03, 0, 0, .09, .47, .02, .25)
MEAN_INTEGERS = (5, 200, 8, 60, 6, 2, 1, 30, 8, 1, 3, 5000, 8)
NEGATIVE_COLUMN, NEGATIVE_SHARE = 7, 0.06
LABEL_RATE = 0.03
BLOCK_ROWS = 1 << 15
WAYS = ("to_integer", "to_integer_64", "decode")
TRIAL_BYTES = 256 << 20
FEATURES = ("numbers", "everything")
"""`numbers`: standardized, each with a flag, by statistics of the training rows. `everything`: besides, a table of each
number's buckets, a cross, and the count and label rate of a column's values."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--gb", type=float, default=10)
    parser.add_argument("--memory-gb", type=float, default=2)
    parser.add_argument("--ids", choices=("hash", "frequency"), default="hash")
    parser.add_argument("--keep", type=Path, help="folder for the file, which is kept and used again")
    parser.add_argument("--beside", type=Path, help="a checkout of another commit, whose code prepares the file too")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--child", nargs="+", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.child:
        print(json.dumps(child(asked.child)))
        return
    with tempfile.TemporaryDirectory() as scratch:
        folder = asked.keep or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        file = folder / f"criteo-{asked.gb:g}gb.tsv"
        if not file.exists():
            make_file(file, int(asked.gb * 1e9))
            os.sync()  # or the disk is still busy with it while the first is measured
        if asked.beside:
            compare(file, Path(scratch), asked)
        else:
            measure(file, Path(scratch), asked.memory_gb, asked.ids)


def compare(file: Path, scratch: Path, asked: argparse.Namespace) -> None:
    """Prepare by both commits, and with features, in turns."""
    found: dict[str, list[dict[str, Any]]] = {}
    for _ in range(asked.turns):
        for name, features, source in (("the other commit", "", asked.beside / "src"), ("this commit", "", None),
                                       *((f"this commit, {how}", how, None) for how in FEATURES)):
            found.setdefault(name, []).append(run_child(
                "prepare", str(file), str(scratch / "out"), str(asked.memory_gb), asked.ids, features, source=source))
            shutil.rmtree(scratch / "out")
    best = {name: min(several, key=lambda one: one["seconds"]) for name, several in found.items()}
    least = {name: min(one["cpu_s"] for one in several) for name, several in found.items()}
    before = best["the other commit"]["seconds"], least["the other commit"]
    size_gb, rows = file.stat().st_size / 1e9, best["this commit"]["rows"]
    table = Table(title=f"{size_gb:.1f} GB, {rows:,} rows, ids by {asked.ids}, {asked.turns} turns")
    for heading in ("", "seconds", "rate", "of processors, s", "rate", "peak memory, GB"):
        table.add_column(heading, justify="right" if heading else "left")
    for name, one in best.items():
        peak_bytes = max(each["peak_bytes"] for each in found[name])
        table.add_row(name, f"{one['seconds']:.1f}", f"{before[0] / one['seconds']:.2f}", f"{least[name]:.1f}",
                      f"{before[1] / least[name]:.2f}", f"{peak_bytes / 1e9:.2f}")
    Console(width=120).print(table)


def measure(file: Path, scratch: Path, memory_gb: float, ids: str) -> None:
    """Both, one after the other, and the ratio."""
    trial = scratch / "trial.tsv"
    with file.open("rb") as whole:
        trial.write_bytes(whole.read(TRIAL_BYTES).rpartition(b"\n")[0] + b"\n")
    rates = {way: run_child("polars", str(trial), way)["rows_per_s"] for way in WAYS}
    way = max(rates, key=lambda w: rates[w])
    print("polars on a part of the file, M rows/s:", {w: round(r / 1e6, 3) for w, r in rates.items()})
    peers = [run_child("polars", str(file), way)]
    ours = run_child("prepare", str(file), str(scratch / "out"), str(memory_gb), ids)
    shutil.rmtree(scratch / "out")
    peers.append(run_child("polars", str(file), way))
    peer = max(peers, key=lambda p: p["rows_per_s"])
    show(file, way, peer, peers, ours, memory_gb)


def show(
    file: Path,
    way: str,
    peer: dict[str, Any],
    peers: Sequence[dict[str, Any]],
    ours: dict[str, Any],
    memory_gb: float,
) -> None:
    console = Console(width=120)
    size_gb = file.stat().st_size / 1e9
    table = Table(title=f"{size_gb:.1f} GB, {ours['rows']:,} rows, {os.cpu_count()} cores")
    for heading in ("", "seconds", "of processors", "M rows/s", "MB/s", "peak memory, GB"):
        table.add_column(heading, justify="right" if heading else "left")
    for name, one in ((f"polars, parse only ({way})", peer), ("embark data prepare, everything", ours)):
        table.add_row(name, f"{one['seconds']:.1f}", f"{one['cpu_s']:.1f}", f"{one['rows_per_s'] / 1e6:.3f}",
                      f"{size_gb * 1e3 / one['seconds']:.0f}", f"{one['peak_bytes'] / 1e9:.2f}")
    console.print(table)
    times = ", ".join(f"{p['seconds']:.1f} s" for p in peers)
    console.print(f"ratio {ours['rows_per_s'] / peer['rows_per_s']:.2f} (polars' runs: {times}); cap {memory_gb:g} GB, "
                  f"{'held' if ours['peak_bytes'] <= memory_gb * 1e9 else 'BROKEN'}, by its own measure "
                  f"{ours['memory_bytes'] / 1e9:.2f} GB")
    console.print("wall time by stage, s:", ours["stages_s"])
    assert peer["rows"] == ours["rows"], (peer["rows"], ours["rows"])


def run_child(*words: str, source: Path | None = None) -> dict[str, Any]:
    """Run one of them in a process of its own, by the code in `source`, and measure all of its memory."""
    process = subprocess.Popen([sys.executable, __file__, "--child", *words], stdout=subprocess.PIPE, text=True,
                               env={**os.environ, **({"PYTHONPATH": str(source)} if source else {})})
    peak, cpu_s, is_over = 0, dict[int, float](), threading.Event()

    def watch() -> None:
        nonlocal peak
        while not is_over.wait(0.1):
            peak = max(peak, tree_bytes(process.pid))
            cpu_s.update(cpu_times(process.pid))

    thread = threading.Thread(target=watch)
    thread.start()
    said, _ = process.communicate()
    is_over.set()
    thread.join()
    if process.returncode:
        raise SystemExit(f"{words[0]} failed")
    found: dict[str, Any] = json.loads(said.splitlines()[-1])
    return found | {"peak_bytes": peak, "cpu_s": sum(cpu_s.values())}


def cpu_times(pid: int) -> dict[int, float]:
    """Of the process and its descendants."""
    found = {}
    with suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        for one in (process, *process.children(recursive=True)):
            used = one.cpu_times()
            found[one.pid] = used.user + used.system
    return found


def child(words: Sequence[str]) -> dict[str, Any]:
    return parse_by_polars(*words[1:]) if words[0] == "polars" else prepare_by_embark(*words[1:])


def parse_by_polars(file: str, way: str) -> dict[str, Any]:
    import polars as pl

    integers = ["label", *(f"int_{i}" for i in range(13))]
    words = [f"cat_{i}" for i in range(26)]
    types = dict.fromkeys(integers, pl.Int32) | dict.fromkeys(words, pl.String)
    parsed = {
        "to_integer": lambda c: c.str.to_integer(base=16, dtype=pl.UInt32),
        "to_integer_64": lambda c: c.str.to_integer(base=16),
        "decode": lambda c: c.str.decode("hex").bin.reinterpret(dtype=pl.UInt32, endianness="big"),
    }[way]
    began_s = time.perf_counter()
    rows = pl.scan_csv(file, separator="\t", has_header=False, schema=types, quote_char=None)
    sums = [pl.col(c).sum() for c in integers] + [parsed(pl.col(c)).max() for c in words]
    found = rows.select(*sums, pl.len().alias("rows")).collect(engine="streaming")
    seconds = time.perf_counter() - began_s
    return {"seconds": seconds, "rows": found["rows"][0], "rows_per_s": found["rows"][0] / seconds}


def prepare_by_embark(file: str, out: str, memory_gb: str, ids: str, how: str = "") -> dict[str, Any]:
    from embark.data.prepare.inputs import Inputs
    from embark.data.prepare.prepare import prepare
    from embark.data.progress import Progress
    from embark.features.schema import Schema, SparseColumn
    from embark.spec.run import RunSpec

    dense = tuple(f"int_{i}" for i in range(13))
    sparse = tuple(SparseColumn(f"cat_{i}", "hex", rows=rows if ids == "hash" else None)
                   for i, rows in enumerate(TABLE_ROWS))
    features: dict[str, Any] = {"numbers": "standardize", "missing_flags": True} if how else {}
    if how == "everything":
        features["bucket_tables"] = True
        sparse = (replace(sparse[0], statistics=("count", "label_rate")), *sparse[1:],
                  SparseColumn("cross", "cross", parts=("cat_5", "cat_8"), buckets=((), ()),
                               rows=1000 if ids == "hash" else None),
                  *(SparseColumn(f"{name}_bucket", "bucket", rows=17, parts=(name,)) for name in dense))
    schema = Schema("criteo", "label", dense, sparse, ("label", *dense, *(column.name for column in sparse)))
    spec = RunSpec.model_validate({"data": {"kind": "prepared", "path": out, "prepare": {
        "ids": ids, "memory_gb": float(memory_gb)}}, **({"features": features} if features else {})})
    inputs, reports = Inputs(), list[Progress]()
    began_s = time.perf_counter()
    result = prepare(spec, schema, inputs, inputs.find(file), Path(out), on_progress=reports.append)
    seconds, rows = time.perf_counter() - began_s, reports[-1].rows
    began: dict[str, float] = {}
    for report in reports:
        began.setdefault(report.stage, report.elapsed_s)
    stages_s = {stage: round(after - before, 2) for (stage, before), (_, after) in pairwise(began.items())}
    return {"seconds": seconds, "rows": rows, "rows_per_s": rows / seconds, "memory_bytes": result.memory_bytes,
            "stages_s": stages_s}


def make_file(path: Path, size_bytes: int) -> None:
    draw, done = np.random.default_rng(1), 0
    with path.open("wb") as file:
        while done < size_bytes:
            text = some_rows(draw, BLOCK_ROWS)
            file.write(text.data)
            done += len(text)


def some_rows(draw: np.random.Generator, num: int) -> NDArray[np.uint8]:
    """Rows as text: every field in a place of its own, then the unused bytes, which are 0, are left out."""
    page = np.zeros((num, 1 + 13 * 8 + 26 * 9 + 1), np.uint8)
    page[:, 0] = ord("0") + (draw.random(num) < LABEL_RATE)
    for i in range(13):
        page[:, 1 + 8 * i] = ord("\t")
        page[:, 2 + 8 * i : 9 + 8 * i] = some_integers(draw, num, i)
    for i in range(26):
        page[:, 105 + 9 * i] = ord("\t")
        page[:, 106 + 9 * i : 114 + 9 * i] = some_ids(draw, num, i)
    page[:, -1] = ord("\n")
    flat = page.reshape(-1)
    return flat[flat != 0]


def some_integers(draw: np.random.Generator, num: int, column: int) -> NDArray[np.uint8]:
    values = np.minimum(draw.exponential(MEAN_INTEGERS[column], num), 9_999_999).astype(np.int64)
    is_negative = draw.random(num) < (NEGATIVE_SHARE if column == NEGATIVE_COLUMN else 0)
    values[is_negative] = 1
    digits = np.zeros((num, 7), np.uint8)
    for place in range(6, -1, -1):
        digits[:, place] = np.where((values > 0) | (place == 6), ord("0") + values % 10, 0)
        values //= 10
    digits[is_negative, 5] = ord("-")
    digits[draw.random(num) < MISSING_INTEGERS[column]] = 0
    return digits


def some_ids(draw: np.random.Generator, num: int, column: int) -> NDArray[np.uint8]:
    ranks = np.power(float(TABLE_ROWS[column]), draw.random(num)).astype(np.uint64)
    bits = (ranks + np.uint64(column << 40)) * np.uint64(0x9E3779B97F4A7C15)
    bits ^= bits >> np.uint64(29)
    bits *= np.uint64(0xBF58476D1CE4E5B9)
    values = (bits >> np.uint64(32)).astype(np.uint32).byteswap().view(np.uint8).reshape(num, 4)
    text = np.empty((num, 8), np.uint8)
    hexadecimal = np.frombuffer(b"0123456789abcdef", np.uint8)
    text[:, 0::2], text[:, 1::2] = hexadecimal[values >> 4], hexadecimal[values & 15]
    text[draw.random(num) < MISSING_IDS[column]] = 0
    return text


if __name__ == "__main__":
    main()
