"""A finished run that is started again: known from its own files, before torch or jax is loaded."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from embark.data import open_training_source, resolve_from_data
from embark.events import Sink
from embark.events.events import changes_of
from embark.model.batch import num_steps_of
from embark.run.identity import identity_of, refuse_changes
from embark.run.open_run import finished_before, finished_step, is_complete, life_events
from embark.spec import RunSpec
from embark.spec.train import with_train_defaults
from embark.store import RunDir, run_uri
from embark.store.lease import current_holder


@dataclass(frozen=True, slots=True)
class OneRank:
    """This process alone."""

    rank: int = 0
    world_size: int = 1
    is_first: bool = True

    def sum_of(self, numbers: list[int]) -> list[int]:
        return numbers

    def gathered(self, value: Any) -> list[Any]:
        return [value]


def finished_already(spec: RunSpec, view: Sequence[Sink]) -> dict[str, Any] | None:
    """What a run in a local directory returned when it finished; None where there is something to train, or to wait
    for, and under torchrun, where the ranks decide together. Raises as the run itself would for another model's."""
    run_dir = RunDir(run_uri(spec.store.root, spec.name))
    if run_dir.is_remote or os.environ.get("WORLD_SIZE", "1") != "1" or not run_dir.events.is_file():
        return None
    events = life_events(run_dir)
    step = finished_step(events)
    if not step or current_holder(run_dir.store) is not None:
        return None
    spec = resolve_from_data(spec)
    source = open_training_source(spec)
    spec = with_train_defaults(spec, source.num_train_samples)
    num_steps = num_steps_of(spec.train, source.num_train_samples)
    identity = identity_of(spec, source, num_steps, OneRank())
    refuse_changes(run_dir, identity, changes_of(events), spec.store.accept_changes, step)
    return finished_before(run_dir, step, spec, view) if is_complete(events, spec.train, num_steps) else None
