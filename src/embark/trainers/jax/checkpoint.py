"""The JAX trainer's state under the names that the torch trainer gives to its own: each reads what the other wrote."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from embark.features.arrays import Array
from embark.model.work import DENSE_STATES
from embark.run.checkpointer import Checkpointer
from embark.run.evaluation import STATE_SIZE
from embark.spec import Table
from embark.store import RunDir
from embark.store.checkpoint_arrays import CheckpointArrays, TensorChunk, of_another_model, table_weight, unsharded
from .network import ROWS_PER_BLOCK, initial_rows
from .state import initial_state, make_state, table_pieces
from .step import weight_shapes

if TYPE_CHECKING:
    from .trainer import JaxTrainer

CHANNEL = "save"
METRICS = "metrics"


def slot_name(table: str) -> str:
    return f"optimizers.tables.tables.embedding_bags.{table}.weight.{table}.momentum1"


def weight_name(weight: str) -> str:
    return f"model.dense.{weight}"


def weight_state_name(weight: str, state: str) -> str:
    return f"optimizers.dense.dense.{weight}.{state}"


class JaxCheckpointer(Checkpointer):
    """Saves over a communication channel of its own, apart from the one that training uses."""

    def __init__(self, run_dir: RunDir, trainer: JaxTrainer) -> None:
        world = trainer.world
        super().__init__(trainer.spec, run_dir, world, lambda value: world.gathered(value, CHANNEL), trainer.layout,
                         world.num_devices)
        self._trainer, self._world = trainer, world
        self._dense_states = DENSE_STATES[trainer.spec.train.dense_optimizer]

    def _start(self) -> None:
        self._trainer.state = initial_state(self._spec, self._trainer.table_layout, self._world)

    def _copied(self, step: int) -> list[TensorChunk]:
        return list(self._pieces(step))

    def _pieces(self, step: int) -> Iterator[TensorChunk]:
        """Yield this process's part of the state; every process goes through all of it."""
        state, world = self._trainer.state, self._world
        for group in self._trainer.table_layout.groups:
            for kind, name_of in (("tables", table_weight), ("slots", slot_name)):
                if group.name not in state[kind]:
                    continue
                for place, first, rows in table_pieces(state[kind][group.name], group, world):
                    size = (place.table.rows, *rows.shape[1:])
                    yield TensorChunk(name_of(place.table.name), size, (first, *(0 for _ in rows.shape[1:])), rows)
        metrics = self._trainer.window.state(state["counts"])
        if not world.is_first:
            return
        for name, weight in state["dense"].items():
            yield unsharded(weight_name(name), np.array(world.fetch(weight)))
            if self._dense_states:
                yield unsharded(weight_state_name(name, "step"), np.array(step, np.float32))
            for kind, values in zip(self._dense_states, state["dense_state"][name], strict=True):
                yield unsharded(weight_state_name(name, kind), np.array(world.fetch(values)))
        yield unsharded(METRICS, metrics)

    def _load(self, arrays: CheckpointArrays, step: int) -> None:
        spec, shapes = self._spec, weight_shapes(self._spec)
        has_slots, is_rowwise = spec.train.optimizer != "sgd", spec.train.optimizer == "rowwise_adagrad"
        for table in spec.model.table_list():
            arrays.entry(table_weight(table.name), (table.rows, table.dim or 0))
            if has_slots and (len(arrays.entry(slot_name(table.name)).size) == 1) != is_rowwise:
                raise of_another_model(f"{slot_name(table.name)} is not the state of {spec.train.optimizer}")

        def table_rows(table: Table, block: int) -> Array:
            return arrays.rows(table_weight(table.name), *_span(table, block))

        def slot_rows(table: Table, block: int) -> Array:
            name = slot_name(table.name)
            if is_rowwise:
                return arrays.rowwise_state(name, table_weight(table.name), *_span(table, block))
            return arrays.rows(name, *_span(table, block))

        self._trainer.state = make_state(
            spec, self._trainer.table_layout, self._world, table_rows, slot_rows if has_slots else None,
            {name: arrays.tensor(weight_name(name), shape) for name, shape in shapes.items()},
            {name: tuple(arrays.tensor(weight_state_name(name, state), shape) for state in self._dense_states)
             for name, shape in shapes.items()}
        )
        self._trainer.window.set_state(arrays.tensor(METRICS, (STATE_SIZE,)))

    def _weight_sizes(self) -> dict[str, tuple[int, ...]]:
        tables = {table_weight(table.name): (table.rows, table.dim or 0) for table in self._spec.model.table_list()}
        return tables | {weight_name(name): tuple(shape) for name, shape in weight_shapes(self._spec).items()}

    def _load_weights(self, arrays: CheckpointArrays) -> None:
        def table_rows(table: Table, block: int) -> Array:
            name, rows = table_weight(table.name), initial_rows(table, block, self._spec.train.seed)
            return arrays.read_into(name, (_span(table, block)[0], 0), np.array(rows))

        dense = {name: arrays.tensor(weight_name(name), shape) for name, shape in weight_shapes(self._spec).items()}
        self._trainer.state = initial_state(self._spec, self._trainer.table_layout, self._world, table_rows, dense)


def _span(table: Table, block: int) -> tuple[int, int]:
    return block * ROWS_PER_BLOCK, min((block + 1) * ROWS_PER_BLOCK, table.rows)
