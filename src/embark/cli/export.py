"""`embark export`: a trained run as an artifact that scores raw rows, or its vectors and ids as Parquet."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from embark.errors import UserError
from embark.formatting import format_bytes, pluralize
from .console import Console, Flag, OptionalInt, Texts

if TYPE_CHECKING:
    from embark.data.export.parquet_files import ParquetFiles
    from embark.export.export_run import ExportResult
    from embark.trainers.torch.scoring.portable_model import PortableResult

ALLOWED = {
    "": {"--to", "--tables", "--step", "--delta"},
    "--embeddings": {"--only", "--step", "--force"}, "--ids": {"--only", "--force"},
    "--splits": {"--force"}, "--format": {"--to", "--step", "--force"}
}
"""What is written → the options that apply to it; the empty name is an artifact."""


def export(
    run: str, /, *, to: str = "", tables: Literal["fp32", "fp16", "int8", "int4"] | None = None,
    step: OptionalInt = None, delta: Flag = False,
    format: Literal["aoti", "triton", "onnx"] | None = None, embeddings: str = "", ids: str = "", splits: str = "",
    only: Texts = (), force: Flag = False,
    console: Console = Console()
) -> None:
    """Export a run's newest checkpoint: weights, id maps and transforms, so that raw rows can be scored anywhere.

    Each export is the next version at its URI: complete, or not there. Servers switch to it. Does not need torch.

    --embeddings and --ids write Parquet instead, a file for each table, which may be larger than memory.

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
    format
        Write the model for a runtime without Embark, into RUN/FORMAT: torch's package, Triton's repository, or ONNX.
    embeddings
        Write the embedding vectors to this folder, with the columns value (as in your data), id, vector.
    ids
        Write the id of each value to this folder, with the columns value, id, count; RUN may be prepared data.
    splits
        Write file, row and split of each row of the raw files to this Parquet file; RUN is prepared data.
    only
        Write only this table, with --embeddings or --ids. Repeatable.
    force
        Replace existing files, with --embeddings, --ids, --splits or --format.
    """
    given = {"--to": to, "--tables": tables, "--step": step is not None, "--delta": delta, "--only": only,
             "--force": force}
    kinds = [kind for kind, value in (("--embeddings", embeddings), ("--ids", ids),
                                      ("--splits", splits), ("--format", format)) if value] or [""]
    extra = [*kinds[1:], *(flag for flag, value in given.items() if value and flag not in ALLOWED[kinds[0]])]
    if extra:
        raise UserError(f"{extra[0]} does not apply to {kinds[0] or 'an artifact, which is always a new version'}",
                        f"leave {extra[0]} out")
    with console.waiting("reading the checkpoint"):
        if embeddings:
            from embark.data.export.embeddings import write_embeddings

            files = write_embeddings(run, embeddings, tables=only, step=step, force=force)
        elif ids:
            from embark.data.export.id_values import write_id_maps

            files = write_id_maps(run, ids, tables=only, force=force)
        elif splits:
            from embark.data.export.row_splits import write_splits

            files = write_splits(run, splits, force=force)
        elif format:
            from embark.trainers.torch.scoring.portable_model import export_portable

            portable = export_portable(run, to, format=format, step=step, force=force)
        else:
            from embark.trainers import export_run

            result = export_run(run, to, tables=tables or "fp32", step=step, delta=delta)
    if format:
        console.show(portable, _render_portable)
    elif kinds != [""]:
        console.show(files, _render_files)
    else:
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
    if index := result.item_index:
        console.text(f"Its index of {index.num_items:,} items ({index.kind}) finds {100 * index.recall:.1f} % of an "
                     f"exact search's first {index.k}.")
    if result.why_no_index:
        console.text(f"Servers cannot retrieve items: {result.why_no_index}.")
    if result.why_no_reference:
        console.text(f"Servers cannot report drift: {result.why_no_reference}.")
    console.text(f"Score rows with: embark score {result.uri} ROWS.csv --to scores.parquet"
                 + (f" --model-file {result.model_file}" if result.model_file else ""))


def _render_portable(console: Console, result: PortableResult) -> None:
    console.result(f"wrote {result.path}: {result.run}, step {result.step:,}, for the {result.device} of this machine "
                   f"by torch {result.torch}")
    if result.runtime == "program":
        console.text(f"There is no C++ compiler: {result.file} is not compiled, and torch.export.load opens it.")


def _render_files(console: Console, result: ParquetFiles) -> None:
    if not console.quiet:
        console.table([{"table": file.table, "column": file.column, "rows": file.num_rows, "values": file.num_values,
                        "file": file.path} for file in result.tables])
    for file in result.tables:
        if file.note:
            console.warning(f"{file.table}: {file.note}")
    step = f", step {result.step:,}" if result.step is not None else ""
    console.result(f"wrote {pluralize(len(result.tables), 'Parquet file')} of {result.source}{step}")
