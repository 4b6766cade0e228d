"""`embark export`: a trained run as an artifact that scores raw rows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

from embark.cli.console import Console
from embark.cli.options import Flag
from embark.errors import UserError
from embark.formatting import format_bytes, pluralize

if TYPE_CHECKING:
    from embark.export.export_run import ExportResult


def export(
    run: str, /, *, to: str = "", tables: Literal["fp32", "fp16", "int8", "int4"] | None = None,
    step: Annotated[int | None, Parameter(show_default=False)] = None, delta: Flag = False,
    weights_only: Flag = False, force: Flag = False, console: Console = Console(),
) -> None:
    """Export a run's newest checkpoint: weights, id maps and transforms, so that raw rows can be scored anywhere.

    Each export is the next version of its place: complete, or not there. Servers switch to it. Does not need torch.

    Parameters
    ----------
    run
        A run's directory, its name under ./runs, or its URI; RUN@best for its best checkpoint, RUN@STEP for a step's.
    to
        A folder, or an s3://, gs:// or az:// URI; default: RUN/export.
    tables
        Bits of the tables' values (default fp32); int8 and int4 have a scale and an offset for each row.
    step
        The checkpoint of this step.
    delta
        Write only the rows and weights that differ from the current version; a full version where these are many.
    weights_only
        Write the weights alone, in float32, to the file --to FILE.safetensors.
    force
        Replace an existing file; with --weights-only.
    """
    from embark.export.export_run import export_weights
    from embark.trainers import export_run

    if weights_only and tables:
        raise UserError("--tables needs an artifact, and --weights-only writes float32", fix="leave one of them out")
    if delta and weights_only:
        raise UserError("--delta changes a version, and --weights-only writes a file", fix="leave one of them out")
    if force and not weights_only:
        raise UserError("--force: an artifact is the next version, and replaces nothing", fix="leave it out")
    with console.waiting("reading the checkpoint"):
        result = export_weights(run, to, step=step, force=force) if weights_only else \
            export_run(run, to, tables=tables or "fp32", step=step, delta=delta)
    console.show(result, _render)


def _render(console: Console, result: ExportResult) -> None:
    console.result(f"wrote {result.path}: {result.run}, step {result.step:,}, {format_bytes(result.num_bytes)}")
    if result.parent is not None:
        console.text(f"It changes {pluralize(result.num_changed_rows, 'row')} of version {result.parent}.")
    elif result.why_full:
        console.text(f"It is a full version: {result.why_full}.")
    if result.best_step not in (None, result.step):
        console.text(f"Early stopping found step {result.best_step:,} better: {result.run}@best names it.")
    if result.tables != "fp32":
        console.text(f"Its {result.tables} tables take {format_bytes(result.table_bytes)}, in fp32 they take "
                     f"{format_bytes(result.fp32_table_bytes)}.")
    if found := result.item_index:
        console.text(f"Its index of {found.num_items:,} items ({found.kind}) finds {100 * found.recall:.1f} % of an "
                     f"exact search's first {found.k}.")
    if result.version is not None:
        console.text(f"Score rows with: embark score {result.uri} ROWS.csv --to scores.parquet"
                     + (f" --model-file {result.model_file}" if result.model_file else ""))
