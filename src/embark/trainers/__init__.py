"""The training libraries behind `run.loop`: torch (TorchRec) and jax (TPUs). This file selects one and imports neither.
May import run and below."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from typing import TYPE_CHECKING

from embark.errors import DataError, MissingPackage, UserError
from embark.spec import accepting
from embark.values import JsonDict

if TYPE_CHECKING:
    from embark.events import Sink
    from embark.events.results import TrainResult
    from embark.export.artifact import ItemIndexInfo
    from embark.export.export_run import ExportResult
    from embark.export.quantize import TableDtype
    from embark.export.safetensors_file import TensorSource
    from embark.run.evaluate_run import EvaluationResult
    from embark.run.feature_metrics import ImportanceResult
    from embark.run.open_run import RunOpener
    from embark.run.signals import StopSignals
    from embark.run.trainer import TrainerBackend
    from embark.spec import RunSpec
    from embark.store.checkpoint_arrays import CheckpointArrays
    from embark.store.checkpoint_inspect import TrainedRun

DEVICES = ("jax", "tpu")


def train(
    spec: RunSpec, view: Sequence[Sink] = (), *, fresh: bool = False, accept_change: Sequence[str] = (),
    signals: StopSignals | None = None, progress: bool | None = None
) -> TrainResult:
    """Train a spec on this machine: start it, resume it, or leave a finished run alone; see `run.loop.train`.

    Returns the values of the last evaluation and of the end. `view` are sinks for the run's events; without any, a
    notebook shows the run as it trains, and other programs show nothing unless `progress` is true. `accept_change`
    names fields that may differ from the run's checkpoints, or `data`.
    """
    from embark.events.results import TrainResult
    from embark.run.loop import train as train_with
    from embark.run.open_run import RunOpener
    from embark.run.signals import StopSignals

    if isinstance(spec, str):
        raise UserError("train takes a spec, and no name of one", f"embark.train(embark.load_spec({spec!r}))")
    spec, view = accepting(spec, accept_change), view or default_view(progress)
    if not fresh and (values := finished_result(spec, view)) is not None:
        return TrainResult(values)
    with ExitStack() as at_end:
        opener = RunOpener(signals or at_end.enter_context(StopSignals()), view, at_end)
        begin(spec, opener, fresh=fresh)
        return TrainResult(train_with(spec, open_backend(spec), view, fresh=fresh, opener=opener))


def default_view(progress: bool | None) -> Sequence[Sink]:
    """Return the view of a run that was started from Python."""
    if progress is None and "IPython" not in sys.modules:  # importing rich takes a tenth of a second
        return ()
    from embark.events.sinks.notebook import default_view as view_here

    return view_here(progress)


def begin(spec: RunSpec, opener: RunOpener, *, fresh: bool) -> None:
    """Begin the run before its library is loaded, if this is its first rank. The hosts of a TPU find that out later."""
    rank = os.getenv("RANK", "")
    if rank == "0" or (not rank and not wants_jax(spec)):
        opener.begin(spec, fresh=fresh)


def finished_result(spec: RunSpec, view: Sequence[Sink]) -> JsonDict | None:
    """Return what a finished run returned, shown without loading torch, or None if the library has to look.

    In JAX the hosts of a TPU decide together.
    """
    from embark.run import open_run

    return None if wants_jax(spec) else open_run.finished_result(spec, view)


def evaluate(run: str, *, data: str = "", split: str = "", step: int | None = None) -> EvaluationResult:
    """Compute AUC, NE, log loss and calibration of a run's newest checkpoint, or of that of `step`; the run is only
    read.

    The rows are those of the run's own evaluation, or of `split`: `train`, `validation` or `test`. `data` names other
    prepared data, or raw CSV, JSON Lines or Parquet files, whose values get the ids that the run's own data gives them.
    """
    from embark.run.evaluate_run import evaluate_run
    from embark.store.checkpoint_inspect import find_trained

    return evaluate_run(find_trained(run, step), open_backend, data=data, split=split)


def export_run(
    run: str, to: str = "", *, tables: TableDtype = "fp32", step: int | None = None, delta: bool = False
) -> ExportResult:
    """Write a checkpoint as an artifact; see `export.export_run`. Only a retrieval model's item index needs torch."""
    from embark.export.export_run import export_run as write_artifact

    return write_artifact(run, to, tables=tables, step=step, build_index=build_index, delta=delta)


def build_index(trained: TrainedRun, arrays: CheckpointArrays) -> tuple[ItemIndexInfo | None, list[TensorSource]]:
    """Build the item index of a retrieval model; a model of the next item has none without faiss or without its data,
    and still scores candidates."""
    if trained.spec.model.is_next_item and find_spec("faiss") is None:
        return None, []
    from .torch.scoring.item_index import build_item_index

    try:
        return build_item_index(trained, arrays)
    except DataError:
        if not trained.spec.model.is_next_item:
            raise
        return None, []


def feature_importance(
    run: str, *, data: str = "", split: str = "", step: int | None = None, rows: int = 50_000,
    on_progress: Callable[[int, int], None] | None = None
) -> ImportanceResult:
    """Measure what the model loses on the rows of `evaluate` when each feature in turn is permuted; see
    `run.feature_metrics`."""
    from embark.run.feature_metrics import measure_importance
    from embark.store.checkpoint_inspect import find_trained

    return measure_importance(find_trained(run, step), open_backend, rows, data=data, split=split,
                              on_progress=on_progress)


def open_backend(spec: RunSpec) -> TrainerBackend:
    """Check and load the library that the spec's `place` section asks for."""
    from embark.stack.versions import require_stack

    if wants_jax(spec):
        require_jax(spec)
        with without_garbage_collection():
            from .jax.trainer import JaxBackend

        return JaxBackend()
    require_stack()
    with without_garbage_collection():
        from .torch.trainer import TorchBackend

    return TorchBackend()


@contextmanager
def without_garbage_collection() -> Iterator[None]:
    """Pause garbage collection during imports, which create a million objects and drop few."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def wants_jax(spec: RunSpec) -> bool:
    """Return whether the spec asks for JAX, or for TPUs, where nothing else runs."""
    from embark.catalog import load_catalog, machine_of_place

    place = spec.place
    # Looked up for every device: a misspelt name is an error, and not a run in another place than was meant.
    machine = machine_of_place(load_catalog(), place) if place.machine else None
    is_tpu = place.target == "tpu-vm" or (machine is not None and machine.gpu.kind == "tpu")
    return place.device in DEVICES or (place.device == "auto" and is_tpu)


def require_jax(spec: RunSpec) -> None:
    """Refuse to run without JAX, with the command that installs it."""
    if find_spec("jax") is None:
        extra = "jax" if spec.place.device == "jax" else "tpu"
        raise MissingPackage(f'place.device = "{spec.place.device}" needs jax, which is not installed',
                             f"pip install 'embark-rec[{extra}]'; on a machine with TPUs it is 'embark-rec[tpu]'")
