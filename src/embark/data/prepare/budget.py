"""How many workers a preparation has, and how much each reads at a time, within a memory limit."""

import os

from embark.data.prepared.manifest import BLOCK_ROWS, SPLITS
from embark.errors import UserError
from embark.features.schema import Schema
from embark.spec import PrepareSpec
from embark.values import frozen

PARENT_BYTES = 160_000_000
"""The process that was started: the interpreter, numpy, the spec, the records of the segments."""
BASE_BYTES = {"criteo": 90_000_000, "csv": 260_000_000, "jsonl": 260_000_000, "parquet": 320_000_000}
"""A worker before its first row: the interpreter and numpy; pyarrow too; the read-ahead of a stream."""
CHUNK_COPIES = {"criteo": 6, "csv": 14, "jsonl": 24, "parquet": 14}
"""Bytes in memory at once for each byte of text in a chunk: the text, its columns, and those on their way."""
MAX_CHUNK_BYTES = 8 << 20
MIN_CHUNK_BYTES = 256 << 10
MAX_RUN_ROWS = 1 << 18
MIN_RUN_ROWS = 1 << 14
BYTES_PER_ENTRY = 64  # Numbering ids: what one distinct value of one run takes while its partition is sorted.


@frozen
class Budget:
    """The memory and the work of each process."""

    memory_bytes: int
    num_workers: int  # 0: one for each task of a cluster.
    chunk_bytes: int  # Text that is decoded at once.
    run_rows: int  # Rows whose values are numbered at once, for ids by frequency.
    worker_bytes: int  # Estimate of the most memory that one worker takes.
    max_entries: int  # Distinct values of runs that are sorted at once.


def plan_budget(prepare: PrepareSpec, schema: Schema, *, has_runs: bool, group_bytes: int = 0) -> Budget:
    """Use as many workers as there are cores, or fewer if the memory is too little for that. Each task of Ray has the
    memory for itself. `group_bytes`: what the rows take that are sorted at once."""
    memory_bytes = int(prepare.memory_gb * 1e9)
    fixed = BASE_BYTES[schema.format] + _writer_bytes(schema)
    chunk_copies, run_row_bytes = CHUNK_COPIES[schema.format], _run_row_bytes(schema) if has_runs else 0
    least = max(fixed + chunk_copies * MIN_CHUNK_BYTES + MIN_RUN_ROWS * run_row_bytes,
                BASE_BYTES[schema.format] + group_bytes)
    wanted = 1 if prepare.executor == "ray" else prepare.num_workers or len(os.sched_getaffinity(0))
    num_workers = min(wanted, (memory_bytes - PARENT_BYTES) // least)
    if num_workers < 1:
        raise UserError(
            f"data.prepare.memory_gb = {prepare.memory_gb:g} is too little for this input",
            f"data.prepare.memory_gb = {-(-(PARENT_BYTES + least) // 10_000_000) / 100} is the least"
        )
    free = (memory_bytes - PARENT_BYTES) // num_workers - fixed
    run_rows = 0
    if has_runs:
        run_rows = max(MIN_RUN_ROWS, min(MAX_RUN_ROWS, (free - chunk_copies * MIN_CHUNK_BYTES) // 2 // run_row_bytes))
    chunk_bytes = min(MAX_CHUNK_BYTES, (free - run_rows * run_row_bytes) // chunk_copies)
    worker_bytes = max(least, fixed + chunk_copies * chunk_bytes + run_rows * run_row_bytes)
    entry_bytes = (memory_bytes - PARENT_BYTES) // num_workers - BASE_BYTES[schema.format]
    num_shown = 0 if prepare.executor == "ray" else num_workers
    return Budget(memory_bytes=memory_bytes, num_workers=num_shown, chunk_bytes=chunk_bytes, run_rows=run_rows,
                  worker_bytes=worker_bytes, max_entries=max(1, entry_bytes // BYTES_PER_ENTRY))


def _writer_bytes(schema: Schema) -> int:
    """Estimate a writer's memory: in each split rows that wait for a block to be full, the same joined, and the block;
    and rows that wait in the segment before, which is still being put on disk."""
    num_dense = len(schema.dense_names) + len(schema.statistics_names)
    row_bytes = 1 + 4 * num_dense + sum(4 * column.most_ids for column in schema.sparse)
    return 4 * len(SPLITS) * BLOCK_ROWS * row_bytes


def _run_row_bytes(schema: Schema) -> int:
    """Estimate the memory of a row with its keys, twice while a run is joined, and one column's while it is sorted."""
    key_bytes = 4 if schema.format == "criteo" else 8
    keys = sum(key_bytes * column.most_ids for column in schema.sparse)
    widest = max((column.most_ids for column in schema.sparse), default=0)
    return 2 * (16 + 4 * len(schema.dense_names) + keys + len(schema.sparse)) + 48 * widest
