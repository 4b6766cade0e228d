"""Turns what a user wrote into what a run trains: data read, sizes and defaults filled in, batch checked, identified.

Training, evaluation, tuning and a finished run begin here. Nothing behind it replaces the spec again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from embark.data import SampleSource, open_training_source, resolve_from_data
from embark.errors import Mistake, SpecError, conflict
from embark.features.numbers import CODES
from embark.model.steps import num_steps_of, steps_per_epoch
from embark.spec import RunSpec, batch_mistakes, with_train_defaults
from embark.spec.run import penalty_mistakes
from embark.values import frozen
from .identity import Identity, identity_of
from .trainer import World
from .training_data import TrainingData, training_data
from .warm_start import with_sizes_of_source

if TYPE_CHECKING:
    from embark.data.prepared.source import Allocate


@frozen
class ResolvedRun:
    """A run as it is trained."""

    spec: RunSpec  # Complete, and without `store.accept_changes`: a change is accepted at one start, not at the next.
    accepted: tuple[str, ...]  # Fields in which this start may differ from the run's checkpoints.
    data: TrainingData
    steps_per_epoch: int
    num_steps: int
    identity: Identity

    @property
    def source(self) -> SampleSource:
        return self.data.source


def resolve_run(spec: RunSpec, world: World | None = None, *, allocate: Allocate | None = None) -> ResolvedRun:
    """Read the data and complete the spec; raises if the data or the `world` that trains it does not fit. All ranks
    call it; without a world, it is not known yet where the run is trained."""
    accepted = spec.store.accept_changes
    if accepted:
        spec = spec.changed(store=spec.store.changed(accept_changes=()))
    spec = resolve_from_data(with_sizes_of_source(spec))
    source = open_training_source(spec, allocate=allocate)
    spec = _with_fitted(with_train_defaults(spec, source.num_train_samples, source.num_eval_samples), source)
    if world:
        check_against(spec, world)
    num_steps = num_steps_of(spec.train, source.num_train_samples)
    return ResolvedRun(
        spec=spec, accepted=accepted, data=training_data(spec, source), num_steps=num_steps,
        steps_per_epoch=steps_per_epoch(source.num_train_samples, spec.train.batch_size),
        identity=identity_of(spec, source, num_steps, world)
    )


def _with_fitted(spec: RunSpec, source: SampleSource) -> RunSpec:
    """Write the state of the numbers' transforms into the spec, with which it travels to whatever scores rows."""
    numbers = getattr(source, "numbers", None)
    if numbers is None or all(code.is_plain for code in numbers.codes):
        return spec
    fitted = CODES.dump_json(numbers.codes).decode()
    return spec.changed(features=spec.features.changed(fitted=fitted))


def resolve_evaluation(spec: RunSpec, world: World) -> RunSpec:
    """Check the spec of a trained run on this machine. A CPU has one engine, whichever trained the run; weights
    that are loaded need no training rows to begin with."""
    changes = {"dense_init": "uniform", **({"engine": "auto"} if world.device_type == "cpu" else {})}
    spec = spec.changed(train=spec.train.model_copy(update=changes))
    check_against(spec, world)
    return spec


def check_against(spec: RunSpec, world: World) -> None:
    """Refuse a spec that does not fit the processes and devices of this run."""
    mistakes: list[Mistake] = [*batch_mistakes(spec.train.batch_size, world.num_devices), *penalty_mistakes(spec)]
    if world.device_type == "cpu" and spec.place.device in ("auto", "cuda"):
        on_cpu = spec.changed(place=spec.place.changed(device="cpu"))
        mistakes += on_cpu.mistakes()
    if spec.stream.is_on and world.world_size > 1:
        mistakes.append(conflict("stream.source", spec.stream.source, f"this run has {world.world_size} ranks, and one "
                                 "process follows a stream", "start one rank; it may have a GPU"))
    if mistakes:
        raise SpecError(mistakes)
