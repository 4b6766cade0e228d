"""JAX as a training library: how it joins the hosts, builds the trainer and fails."""

from contextlib import AbstractContextManager

import jax

from embark.data import Source
from embark.errors import EmbarkError, Fault, UserError
from embark.spec import PlaceSpec, RunSpec
from embark.store import RunDir
from embark.trainers.jax.trainer import JaxTrainer
from embark.trainers.jax.world import World, join

LOST_PEER = ("connection reset", "connection closed", "deadline_exceeded", "unavailable:", "gloo", "nccl", "heartbeat")


class JaxBackend:
    """JAX on TPUs, and on whatever else it finds."""

    def join(self, place: PlaceSpec) -> AbstractContextManager[World]:
        return join(place)

    def allocator(self, world: World) -> None:
        """Ordinary memory."""

    def build(self, spec: RunSpec, world: World, num_steps: int, source: Source, run_dir: RunDir) -> JaxTrainer:
        if world.kind != "cpu":  # a resumed run need not wait a minute for the same programs to be compiled again
            jax.config.update("jax_compilation_cache_dir", str(run_dir.path / "programs"))
        return JaxTrainer(spec, world, num_steps, source)

    def explain(self, error: RuntimeError) -> EmbarkError | None:
        text = str(error)
        line = text.splitlines()[0] if text else ""
        if "RESOURCE_EXHAUSTED" in text:
            return UserError(f"out of device memory: {line}",
                             fix='a smaller train.batch_size, train.table_dtype = "fp16", or more devices; '
                                 "embark plan SPEC --tpu-compile v5e:2x4 asks the compiler beforehand")
        if any(sign in text.lower() for sign in LOST_PEER):
            return Fault(f"a process was lost: {line}", fix="start the run again: it resumes from its last checkpoint")
        return None
