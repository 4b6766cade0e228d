"""The torch trainer's state: what it is, how it is written, and how it is read."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from embark.run.checkpointer import Checkpointer
from embark.store import Checkpoint, ChecksumStore, RunDir, checkpoint_name
from embark.trainers.torch.dcp_files import plain_errors, reader, writer
from embark.trainers.torch.rng import random_state, set_random_state
from embark.trainers.torch.rowwise_state import RowwiseRecut
from embark.trainers.torch.staging import Staging, State

if TYPE_CHECKING:
    from embark.trainers.torch.trainer import TorchTrainer


class TorchCheckpointer(Checkpointer):
    """Saves with a process group of its own, beside the one that trains."""

    def __init__(self, run_dir: RunDir, trainer: TorchTrainer) -> None:
        world = trainer.world
        group = dist.new_group(backend="gloo", timeout=world.timeout) if world.world_size > 1 else None
        super().__init__(trainer.spec, run_dir, world, lambda value: world.gathered(value, group), trainer.layout,
                         world.world_size)
        self._trainer = trainer
        self._world = world
        self._group = group
        self._staging = Staging()

    def _copied(self, step: int) -> State:
        self._trainer.engine.settle(step)
        return self._staging.copy(self._state())

    def _write_arrays(self, step: int, copied: State, store: ChecksumStore) -> dict[str, bytes]:
        with plain_errors("save"):
            dcp.save(copied, storage_writer=writer(store, checkpoint_name(step)), process_group=self._group,
                     no_dist=self._group is None)
        return {}

    def _load(self, checkpoint: Checkpoint) -> None:
        self._trainer.optimizers.init_state()
        state = self._state(is_load=True)
        here = f"random.{self._world.rank}"
        source = reader(self._checkpoints.store, checkpoint.name)
        saved = source.read_metadata()
        if not any(name.startswith(f"{here}.") for name in saved.state_dict_metadata):  # saved by fewer ranks
            state.pop(here)
        recut = RowwiseRecut(saved)
        with plain_errors("load"):
            dcp.load({**state, "optimizers": recut.prepare(state["optimizers"])}, storage_reader=source)
        recut.fill()
        self._trainer.model.load_state_dict(state["model"])
        self._trainer.optimizers.both.load_state_dict({"state": state["optimizers"]})
        self._trainer.optimizers.set_step(checkpoint.step)
        self._trainer.window.set_state(state["metrics"], self._world)
        if here in state:
            set_random_state(state[here], self._world.device)

    def _state(self, *, is_load: bool = False) -> State:
        """Tensors only, by name. Everything else a run knows follows from its spec and its step."""
        return {
            "model": self._trainer.model.state_dict(),
            "optimizers": self._trainer.optimizers.both.state_dict()["state"],
            "metrics": self._trainer.window.empty_state() if is_load else self._trainer.window.state(self._world),
            f"random.{self._world.rank}": random_state(self._world.device),
        }
