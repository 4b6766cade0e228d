"""`embark data check` of a custom source: whether it keeps what resuming and several ranks rely on.

    python -m embark.data.custom_contract ANSWER.txt < spec.toml

gives the fingerprint of its samples from a process of its own.
"""

import os
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from contextlib import redirect_stdout
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from embark.errors import UserError
from embark.features.arrays import Int64s
from embark.spec import RunSpec, resolve, to_toml
from .column_report import Problem, Report, check_columns
from .custom_data import CustomSource, rows_digest, spread
from .loader import Batch
from .permuted_rows import RowsInMemory

MODULE = "embark.data.custom_contract"
LIMIT_S = 600.0
NUM_ROWS = 20_000  # Samples of each split.
NUM_ALONE = 256


def check_contract(spec: RunSpec) -> Report:
    """Run the code and try each promise on up to `NUM_ROWS` samples of each split. What it prints goes to stderr:
    stdout is the report's."""
    with redirect_stdout(sys.stderr):
        source = CustomSource(spec.model, spec.data)
        problems = tuple(Problem(promise, what) for promise, what in _broken_promises(spec, source) if what)
        rows = {"train": source.num_train_samples, "validation": source.num_eval_samples}
        return Report(spec.data.kind, rows, problems) if problems else check_columns(spec)


def _broken_promises(spec: RunSpec, source: CustomSource) -> Iterator[tuple[str, str]]:
    """Yield each promise, and what breaks it; empty where it holds."""
    splits = {"train": source.num_train_samples, "eval": source.num_eval_samples}
    if splits["train"] < spec.train.batch_size:
        yield "an epoch has at least one batch", \
            f"num_train_samples is {splits['train']:,}, and train.batch_size {spec.train.batch_size:,}"
    parts = [(split, spread(count, NUM_ROWS)) for split, count in splits.items() if count]
    try:
        batches = [source.rows(*part) for part in parts]
    except UserError as error:
        yield "types, shapes, labels and ids are those of the spec", \
            f"{error.what}; {error.fix}" if error.fix else error.what
        return
    for part, batch in zip(parts, batches, strict=True):
        yield "a position gives the same sample, whatever is asked for before it and beside it", \
            _unstable(source, *part, batch)
    yield "another process gives the same samples", _other_process(spec, source.fingerprint())


def _unstable(source: CustomSource, split: str, positions: Int64s, first: Batch) -> str:
    if rows_digest(source.rows(split, positions)) != rows_digest(first):
        return f"the same positions of {split} give other samples the second time"
    together = RowsInMemory(first)
    for at in np.random.default_rng(0).permutation(len(positions))[:NUM_ALONE]:
        alone = source.rows(split, positions[at : at + 1])
        if rows_digest(alone) != rows_digest(together.eval_rows(at, at + 1)):
            return f"position {positions[at]} of {split} gives another sample alone than among {len(positions):,}"
    return ""


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
            "time, the order of a set, or a global random state instead of numpy.random.default_rng([seed, position])"


if __name__ == "__main__":
    run: RunSpec = resolve(tomllib.loads(sys.stdin.read()))
    Path(sys.argv[1]).write_text(CustomSource(run.model, run.data).fingerprint(), encoding="utf-8")
