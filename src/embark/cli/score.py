"""`embark score`: scores of raw rows by an exported model, as Parquet."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from embark.formatting import format_float, pluralize
from .console import Console, Flag, OptionalInt

if TYPE_CHECKING:
    from embark.serve.score_file import ScoreResult

Columns = Annotated[tuple[str, ...], Parameter(
    name="--keep", help="Copy this column of the rows to the output. Repeatable.", negative="", show_default=False)]


def score(
    artifact: str, rows: str, /, *, to: str, keep: Columns = (),
    version: OptionalInt = None, model_file: str = "",
    force: Flag = False, console: Console = Console()
) -> None:
    """Score the raw rows of files with an exported model, on this machine's CPU: one Parquet file.

    Row i of the output is row i of the input; a row that cannot be read has no score.

    Parameters
    ----------
    artifact
        Where `embark export` wrote to: a folder or a URI.
    rows
        CSV, JSON Lines or Parquet: a file, a folder or a glob; the columns of the training data, without the label.
    to
        The Parquet file to write.
    version
        This version of the artifact; default: the current one.
    model_file
        The file of a custom model, as it was trained: an artifact holds no code.
    force
        Replace an existing file.
    """
    from embark.serve.score_file import score_file

    with console.waiting("scoring"):
        result = score_file(artifact, rows, to, keep=keep, version=version, model_file=model_file, force=force)
    console.show(result, _render)


def _render(console: Console, result: ScoreResult) -> None:
    from embark.features.rows import CUT_LISTS

    for reason, num in result.reasons.items():
        console.warning(f"{pluralize(num, 'row')} without a score: {reason}")
    for example in result.examples[:3]:
        console.text(f"  {example}")
    if result.num_lists_cut:
        console.warning(f"{CUT_LISTS}: {result.num_lists_cut:,}")
    mean = "" if result.mean_score is None else f", mean {format_float(result.mean_score)}"
    console.result(f"wrote {result.path}: {pluralize(result.num_scored, 'score')} by version {result.version} of "
                   f"{result.uri}{mean}")
