"""`embark data prepare` of a generated log to sequences, and how many of them a loader delivers.

    python bench/event_log.py [--rows 50_000_000] [--users 2_000_000] [--memory-gb 3.5] [--keep FOLDER]

A row has a user and an item, both words, and a time; rows are in no order. Memory is that of the command with all of
its processes, each page that they share counted once for each of them. The loader is measured in one thread, over
the first million users of an epoch, with 50 items of a history and 128 negatives.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from rich.console import Console

from embark.data import open_source, resolve_from_data
from embark.data.progress import tree_bytes
from embark.spec import resolve

NUM_ITEMS = 1_000_000
BLOCK_ROWS = 1 << 18
WIDTHS = (1 + 8, 1 + 3 + 8, 1 + 10)
"""Of a row: `u` and 8 digits, a comma, `it-` and 8 digits, a comma, 10 digits of seconds."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rows", type=int, default=50_000_000)
    parser.add_argument("--users", type=int, default=2_000_000)
    parser.add_argument("--memory-gb", type=float, default=3.5)
    parser.add_argument("--negatives", choices=["uniform", "frequency", "in_batch"], default="uniform")
    parser.add_argument("--keep", type=Path, help="folder for the log and the data, which are kept and used again")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = given.keep or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        log = folder / f"log-{given.rows}.csv"
        if not log.exists():
            make_log(log, given.rows, given.users)
        data = folder / f"data-{given.rows}"
        settings = ["model.kind=sasrec", "data.kind=prepared", f"data.path={data}", f"data.prepare.input={log}",
                    f"data.prepare.memory_gb={given.memory_gb}", f"data.interactions.negatives={given.negatives}"]
        if not (data / "manifest.json").exists():
            prepare(settings)
        load(settings)


def make_log(path: Path, num_rows: int, num_users: int) -> None:
    """Write a log in which some users and some items are many times as frequent as others."""
    draw = np.random.default_rng(1)
    with path.open("wb") as file:
        file.write(b"user,item,at\n")
        for start in range(0, num_rows, BLOCK_ROWS):
            num = min(BLOCK_ROWS, num_rows - start)
            users = (num_users * draw.random(num) ** 1.5).astype(np.int64)
            items = np.power(float(NUM_ITEMS), draw.random(num)).astype(np.int64)
            page = np.zeros((num, sum(WIDTHS) + 3), np.uint8)
            for at, mark, values, width in ((0, b"u", users, 8), (9, b",it-", items, 8),
                                            (21, b",", draw.integers(1_600_000_000, 1_750_000_000, num), 10)):
                page[:, at : at + len(mark)] = np.frombuffer(mark, np.uint8)
                for place in range(width):
                    page[:, at + len(mark) + width - 1 - place] = ord("0") + values // 10**place % 10
            page[:, 32] = ord("\n")
            file.write(page[:, :33].tobytes())


def prepare(settings: list[str]) -> None:
    """Run the command, and look at the memory of its processes from outside."""
    sets = [part for setting in settings for part in ("--set", setting)]
    spec = Path(tempfile.mkdtemp()) / "spec.toml"
    spec.write_text("")
    began_s, most = time.perf_counter(), 0
    command = [sys.executable, "-m", "embark", "data", "prepare", str(spec), *sets, "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        while process.poll() is None:
            most = max(most, tree_bytes(process.pid))
            time.sleep(0.1)
        output = process.stdout.read() if process.stdout else b""
    seconds = time.perf_counter() - began_s
    if process.returncode:
        raise SystemExit(output.decode())
    found = json.loads(output)
    rows = Path(settings[3].partition("=")[2]).stat().st_size // 33
    Console().print(f"prepared {rows:,} rows in {seconds:.0f} s, {rows / seconds:,.0f} rows/s, {most / 1e9:.2f} GB; "
                    f"{found['rows']}")


def load(settings: list[str]) -> None:
    """Measure batches of 512 users in one thread."""
    source = open_source(resolve_from_data(resolve({}, settings)))
    num = min(1_000_000, source.num_train_samples) // 512 * 512
    rates: list[float] = []
    for epoch in range(2):
        began_s = time.perf_counter()
        ids: list[NDArray[np.int32]] = [source.train_rows(epoch, start, start + 512).ids[:1]
                                        for start in range(0, num, 512)]
        rates.append(len(ids) * 512 / (time.perf_counter() - began_s))
    Console().print(f"loaded {num:,} sequences, {rates[0]:,.0f} a second, then {rates[1]:,.0f}, in one thread")


if __name__ == "__main__":
    main()
