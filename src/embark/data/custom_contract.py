"""`embark data check` of a custom source: whether it keeps what resuming and several ranks rely on.

    python -m embark.data.custom_contract ANSWER.txt < spec.toml

gives the fingerprint of its samples from a process of its own.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from embark.data.custom_data import CustomSource, rows_digest, spread
from embark.data.leaks import ColumnsReport, check_columns
from embark.data.loader import Batch
from embark.data.rows_in_memory import RowsInMemory
from embark.errors import UserError
from embark.features.arrays import Int64s
from embark.spec import RunSpec, resolve, to_toml

MODULE = "embark.data.custom_contract"
LIMIT_S = 600.0
NUM_ROWS = 20_000  # Samples of each split.
NUM_ALONE = 256


@dataclass(frozen=True, slots=True)
class ContractCheck:
    """One promise, and what breaks it; empty where it holds."""

    promise: str
    problem: str = ""


@dataclass(frozen=True, slots=True)
class ContractReport:
    """The result of `embark data check` for the user's own data code."""

    kind: str
    num_train_samples: int
    num_eval_samples: int
    checks: tuple[ContractCheck, ...]
    columns: ColumnsReport | None  # None if a promise is broken.

    @property
    def num_problems(self) -> int:
        return sum(bool(check.problem) for check in self.checks)


def check_contract(spec: RunSpec) -> ContractReport:
    """Run the code and try each promise on up to `NUM_ROWS` samples of each split. What it prints goes to stderr:
    stdout is the report's."""
    with redirect_stdout(sys.stderr):
        source = CustomSource(spec.model, spec.data)
        checks = tuple(_checks(spec, source))
        is_ok = not any(check.problem for check in checks)
        return ContractReport(spec.data.kind, source.num_train_samples, source.num_eval_samples, checks,
                              check_columns(spec) if is_ok else None)


def _checks(spec: RunSpec, source: CustomSource) -> Iterator[ContractCheck]:
    num = source.num_train_samples
    yield ContractCheck("an epoch has at least one batch", "" if num >= spec.train.batch_size else
                        f"num_train_samples is {num:,}, and train.batch_size {spec.train.batch_size:,}")
    splits = {"train": num, "eval": source.num_eval_samples}
    parts = [(split, spread(count, NUM_ROWS)) for split, count in splits.items() if count]
    promise = "types, shapes, labels and ids are those of the spec"
    try:
        batches = [source.rows(*part) for part in parts]
    except UserError as error:
        yield ContractCheck(promise, f"{error.what}; {error.fix}" if error.fix else error.what)
        return
    yield ContractCheck(promise)
    yield ContractCheck("a position gives the same sample, whatever is asked for before it and beside it", next(
        filter(None, (_unstable(source, *part, batch) for part, batch in zip(parts, batches, strict=True))), ""))
    yield ContractCheck("the global random state of Python and numpy is neither used nor changed",
                        next(filter(None, (_random_state(source, *part) for part in parts)), ""))
    yield ContractCheck("another process gives the same samples", _other_process(spec, source.fingerprint()))


def _unstable(source: CustomSource, split: str, positions: Int64s, first: Batch) -> str:
    if rows_digest(source.rows(split, positions)) != rows_digest(first):
        return f"the same positions of {split} give other samples the second time"
    together = RowsInMemory(first)
    for at in np.random.default_rng(0).permutation(len(positions))[:NUM_ALONE]:
        alone = source.rows(split, positions[at : at + 1])
        if rows_digest(alone) != rows_digest(together.eval_rows(at, at + 1)):
            return f"position {positions[at]} of {split} gives another sample alone than among {len(positions):,}"
    return ""


def _random_state(source: CustomSource, split: str, positions: Int64s) -> str:
    some, found = positions[:512], []
    for seed in (1, 2):
        random.seed(seed)
        np.random.seed(seed)
        before = (random.getstate(), str(np.random.get_state()))
        found.append(rows_digest(source.rows(split, some)))
        if (random.getstate(), str(np.random.get_state())) != before:
            return "draw from a generator of its own: numpy.random.default_rng([data.seed, position])"
    return "" if found[0] == found[1] else "the samples depend on it"


def _other_process(spec: RunSpec, fingerprint: str) -> str:
    with TemporaryDirectory(prefix="embark-check-") as folder:
        answer = Path(folder, "answer.txt")
        try:
            done = subprocess.run([sys.executable, "-P", "-m", MODULE, str(answer)], input=to_toml(spec).encode(),
                                  env={**os.environ, "PYTHONHASHSEED": "1"}, capture_output=True, timeout=LIMIT_S,
                                  check=False)
        except subprocess.TimeoutExpired:
            return f"it took more than {LIMIT_S:.0f} s"
        if not answer.exists():
            lines = done.stderr.decode(errors="replace").strip().splitlines()
            return f"it failed: {lines[-1] if lines else done.returncode}"
        return "" if answer.read_text() == fingerprint else "its samples are others: they depend on the process, the " \
            "time, or the order of a set"


if __name__ == "__main__":
    run: RunSpec = resolve(tomllib.loads(sys.stdin.read()))
    Path(sys.argv[1]).write_text(CustomSource(run.model, run.data).fingerprint(), encoding="utf-8")
