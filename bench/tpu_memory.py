"""What `embark plan` counts for a TPU chip beside what the TPU's own compiler plans, for runs of many shapes.

    python bench/tpu_memory.py OUT.csv         compiles every run that OUT.csv does not have yet, and adds it; no TPU
    python bench/tpu_memory.py --measured FILE computes only: compares the rows of a CSV

Compiling needs `pip install 'embark-rec[tpu]'` and one to ten minutes a run.
"""

from __future__ import annotations

import argparse
import csv
import sys
from dataclasses import dataclass
from pathlib import Path

from embark.cli.console import Console
from embark.spec import RunSpec, load_spec

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))

from tpu_compiler import CompiledStep, PlannedStep, compile_for, planned_step

WIDE = "model.num_tables=4 model.rows_per_table=4000000 model.embedding_dim=128"
SMALL = "model.num_tables=2 model.rows_per_table=1000000 model.bottom_mlp=[256] model.top_mlp=[256]"
CROSSED = "model.top_mlp=[256] train.batch_size=32768 " \
          'model.tables=[{name="a",rows=3000000,multi_hot=3},{name="b",rows=400000,multi_hot=1}]'
RUNS = [
    ("v5e:2x2", "quickstart", f"{WIDE} train.batch_size=8192"),
    ("v5e:2x4", "quickstart", f"{WIDE} train.batch_size=16384"),
    ("v5e:4x4", "quickstart", f"{WIDE} train.batch_size=32768"),
    ("v5e:8x8", "quickstart", f"{WIDE} train.batch_size=131072"),
    ("v5p:2x2x1", "quickstart", f"{WIDE} train.batch_size=8192"),
    ("v6e:4x4", "quickstart", f"{WIDE} train.batch_size=32768"),
    ("v5e:2x4", "quickstart", "model.num_tables=2 model.rows_per_table=1000000 model.embedding_dim=128 "
     "model.bottom_mlp=[64] model.top_mlp=[64] train.batch_size=65536"),
    ("v5e:2x4", "quickstart", "model.num_tables=4 model.rows_per_table=2000000 model.embedding_dim=128 "
     "model.bottom_mlp=[512,256] model.top_mlp=[512,256] train.batch_size=262144"),
    ("v5p:2x2x1", "quickstart", "model.num_tables=2 model.rows_per_table=2000000 model.embedding_dim=128 "
     "model.bottom_mlp=[256] model.top_mlp=[256] train.batch_size=65536"),
    ("v6e:2x2", "quickstart", f"{SMALL} model.embedding_dim=32 train.batch_size=32768"),
    ("v6e:2x2", "quickstart", f"{SMALL} model.embedding_dim=100 train.batch_size=32768"),
    ("v5e:2x2", "quickstart", f"{SMALL} model.embedding_dim=64 train.batch_size=32768 train.optimizer=adagrad"),
    ("v5p:2x2x1", "mlperf-dcnv2", CROSSED),
    ("v6e:2x2", "quickstart", f"{SMALL} model.embedding_dim=128 train.batch_size=32768 train.table_dtype=fp16 "
     "train.dense_optimizer=adam"),
    ("v5e:2x2", "quickstart", f"{SMALL} model.embedding_dim=128 train.batch_size=32768 train.optimizer=sgd"),
    ("v5e:2x4", "quickstart", "train.batch_size=16384"),
    ("v5e:2x4", "criteo-1tb", ""),
    ("v5p:2x2x1", "criteo-1tb", ""),
]
"""Chips, a spec, and what is set in it."""
COUNTED = ("num_chips", "batch_per_chip", "argument_bytes", "temporary_bytes", "output_bytes", "shared_bytes",
           "code_bytes")
HEADINGS = {"run": "run", "chips": "chips", "arguments": "arguments", "arguments_off": "off",
            "temporary": "during a step", "temporary_off": "times", "total": "in all", "total_off": "off"}


@dataclass(frozen=True, slots=True)
class Row:
    """One run, compiled."""

    spec_name: str
    sets: str
    compiled: CompiledStep

    @property
    def spec(self) -> RunSpec:
        return load_spec(self.spec_name, self.sets.split())

    @property
    def planned(self) -> PlannedStep:
        return planned_step(self.spec, self.compiled.topology, self.compiled.num_chips)


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("out", type=Path, nargs="?")
    arguments.add_argument("--measured", type=Path)
    asked = arguments.parse_args()
    if asked.measured is None:
        if asked.out is None:
            arguments.error("a file to add to, or --measured FILE")
        known = {(row.compiled.topology, row.spec_name, row.sets) for row in recorded(asked.out)}
        for topology, name, sets in RUNS:
            if (topology, name, sets) not in known:
                spec = load_spec(name, sets.split())
                add(asked.out, Row(name, sets, compile_for(spec, topology)))
    Console().table([compared(row) for row in recorded(asked.measured or asked.out)], HEADINGS)


def recorded(path: Path) -> list[Row]:
    """The rows of a CSV, none where it is not there yet."""
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return [Row(row["spec"], row["sets"], CompiledStep(row["topology"], *(int(row[name]) for name in COUNTED),
                                                       float(row["compile_s"])))
                for row in csv.DictReader(file)]


def add(path: Path, row: Row) -> None:
    """One more row; a new file gets its headings first."""
    compiled = row.compiled
    values = {"spec": row.spec_name, "sets": row.sets, "topology": compiled.topology,
              **{name: getattr(compiled, name) for name in COUNTED}, "compile_s": round(compiled.compile_s)}
    is_new = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, list(values), lineterminator="\n")
        if is_new:
            writer.writeheader()
        writer.writerow(values)


def compared(row: Row) -> dict[str, object]:
    """Ours beside the compiler's."""
    compiled, planned, spec = row.compiled, row.planned, row.spec
    train = spec.train
    return {
        "run": f"{spec.model.kind}, {len(spec.model.table_list())} tables, D {spec.model.embedding_dim}, "
               f"{compiled.batch_per_chip:,} samples, {train.optimizer}, {train.table_dtype}",
        "chips": compiled.topology,
        "arguments": f"{compiled.argument_bytes / 1e6:,.1f} MB",
        "arguments_off": f"{planned.argument_bytes / compiled.argument_bytes - 1:+.2%}",
        "temporary": f"{compiled.temporary_bytes / 1e6:,.1f} MB",
        "temporary_off": f"{planned.temporary_bytes / compiled.temporary_bytes:.2f}",
        "total": f"{compiled.peak_bytes / 1e6:,.1f} MB",
        "total_off": f"{planned.peak_bytes / compiled.peak_bytes - 1:+.1%}",
    }


if __name__ == "__main__":
    main()
