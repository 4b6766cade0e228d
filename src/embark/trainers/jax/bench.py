"""How fast JAX's trainer steps here, from batches that are in host memory before the clock starts."""

from collections.abc import Callable
from itertools import count

import jax

from embark.data import SampleSource, open_source, resolve_from_data
from embark.data.loader import Prefetcher
from embark.errors import UserError
from embark.model.jax_layout import NUM_AHEAD
from embark.run.resolve import check_against
from embark.spec import RunSpec
from embark.spec.train import with_train_defaults
from embark.trainers.bench import ENDLESS, BenchResult, first_batches, time_contender
from embark.trainers.jax.prefetch import to_devices
from embark.trainers.jax.state import initial_state
from embark.trainers.jax.trainer import JaxTrainer
from embark.trainers.jax.world import World, join


class JaxContender:
    """The trainer, ready to step; a thread puts the next batches on the devices meanwhile, as in a run."""

    def __init__(self, spec: RunSpec, world: World, source: SampleSource) -> None:
        self.trainer = JaxTrainer(spec, world, ENDLESS, source)
        self.trainer.state = initial_state(spec, self.trainer.table_layout, world)
        self.name = f"Embark, {self.trainer.engine.name}, {self.trainer.precision}, from memory"
        batches = first_batches(spec, source)
        self._prefetcher = Prefetcher(
            lambda number: to_devices(batches[number % len(batches)], spec, self.trainer.table_layout, world), ENDLESS,
            depth=NUM_AHEAD,
        )
        self._prefetcher.start()
        self._placed = self._prefetcher.take()
        self._numbers = count()

    def run(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self.trainer.step(self._placed, next(self._numbers))

    def wait(self) -> None:
        jax.block_until_ready(self.trainer.state)

    def memory_bytes(self) -> int:
        return self.trainer.peak_bytes()

    def close(self) -> None:
        self._prefetcher.close()


def bench(spec: RunSpec, *, seconds: float, progress: Callable[[str], None]) -> BenchResult:
    """Return the samples a second of all devices together, a step's time, and memory where JAX reports it."""
    with join(spec.place) as world:
        if world.world_size > 1:
            raise UserError("embark bench measures one process", fix="run it on one host")
        spec = resolve_from_data(spec)
        source = open_source(spec)
        spec = with_train_defaults(spec, source.num_train_samples)
        check_against(spec, world)
        row = time_contender(lambda: JaxContender(spec, world, source), spec.train.batch_size, seconds)
        progress(row.name)
        return BenchResult(spec.train.batch_size, world.device_name, f"jax {jax.__version__}", [row])
