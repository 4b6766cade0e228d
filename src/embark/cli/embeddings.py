"""`embark embeddings`: a run's embedding vectors as Parquet."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from embark.cli.console import Console
from embark.cli.options import Flag
from embark.formatting import pluralize

if TYPE_CHECKING:
    from embark.data.export.parquet_files import ParquetFiles

Tables = Annotated[tuple[str, ...], Parameter(name="--table", help="Only this table. Repeatable.", negative="",
                                              show_default=False)]


def embeddings(
    run: str, /, *, to: str, table: Tables = (), step: Annotated[int | None, Parameter(show_default=False)] = None,
    force: Flag = False, console: Console = Console(),
) -> None:
    """Write the embedding vectors of a run's newest checkpoint: one Parquet file per table.

    Columns: value (as in your data), id, vector. Does not need torch, and tables may be larger than memory.

    Parameters
    ----------
    run
        A run's directory, its name under ./runs, or its URI; RUN@best for its best checkpoint, RUN@STEP for a step's.
    to
        The folder to write to.
    step
        The checkpoint of this step.
    force
        Replace existing files.
    """
    from embark.data.export.embeddings import write_embeddings

    with console.waiting("reading the checkpoint"):
        result = write_embeddings(run, to, tables=table, step=step, force=force)
    console.show(result, render_files)


def render_files(console: Console, result: ParquetFiles) -> None:
    """Of `embark data ids` too."""
    if not console.quiet:
        console.table([{"table": one.table, "column": one.column, "rows": one.num_rows, "values": one.num_values,
                        "file": one.path} for one in result.tables])
    for one in result.tables:
        if one.note:
            console.warning(f"{one.table}: {one.note}")
    step = f", step {result.step:,}" if result.step is not None else ""
    console.result(f"wrote {pluralize(len(result.tables), 'Parquet file')} of {result.source}{step}")
