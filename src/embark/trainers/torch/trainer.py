"""The model of a spec, sharded over the ranks, with its optimizers and its engine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from torchrec.distributed.model_parallel import DistributedModelParallel

from embark.data import Batch, Source
from embark.run.host_memory import peak_resident_bytes
from embark.run.metrics import F64
from embark.run.trouble import Trouble
from embark.spec import RunSpec
from embark.store import RunDir
from embark.trainers.torch.batch import ToDevice
from embark.trainers.torch.checkpoint import TorchCheckpointer
from embark.trainers.torch.cpu_lookup import use_fast_cpu_lookup
from embark.trainers.torch.engine_selection import make_engine
from embark.trainers.torch.engines.pipeline import EngineInputs, Part
from embark.trainers.torch.initial import fill_tables
from embark.trainers.torch.metrics import MetricWindow
from embark.trainers.torch.model import Recommender
from embark.trainers.torch.optimizers import fuse_into_backward, make_optimizers
from embark.trainers.torch.phases import Profiler
from embark.trainers.torch.precision import choose_precision, set_matmul_precision
from embark.trainers.torch.sharding import describe, make_plan, make_sharder, sharded_tables
from embark.trainers.torch.waiting import InputWaits
from embark.trainers.torch.world import World


class TorchTrainer:
    """Put together in the order TorchRec needs: optimizer into backward, plan, shard, fill, pipeline."""

    def __init__(self, spec: RunSpec, world: World, num_steps: int, source: Source) -> None:
        self.spec, self.world = spec, world
        torch.manual_seed(spec.train.seed)
        self.precision = choose_precision(spec.train, world.device)
        set_matmul_precision(self.precision)
        model = Recommender(spec.model, spec.train, world.device, is_bf16=self.precision == "bf16")
        fuse_into_backward(model.tables, spec.train)
        sharder = make_sharder(spec)
        plan = make_plan(model, sharder, spec, world)
        self.model = DistributedModelParallel(model, device=world.device, plan=plan, sharders=[sharder])
        if isinstance(self.model._dmp_wrapped_module, DistributedDataParallel):
            # Else it lays its buckets out anew after the first step, and sums over more than two ranks round otherwise
            # from then on: a resumed run would not be, bit for bit, the one that was never interrupted.
            self.model._dmp_wrapped_module.reducer._push_all_rebuilt_params()
        fill_tables(sharded_tables(self.model), spec.model, spec.train.seed)
        if world.device.type == "cpu":
            use_fast_cpu_lookup(self.model)
        self.optimizers = make_optimizers(self.model, spec.train, num_steps, world.device)
        self.window = MetricWindow(world.device)
        """What the engine counts its predictions in."""
        self.engine = make_engine(EngineInputs(
            spec=spec, world=world, plan=plan, model=self.model, dense=model.dense, optimizers=self.optimizers,
            precision=self.precision, window=self.window,
        ), source)
        self.layout: dict[str, Any] = describe(plan, spec)
        in_tables = sum(t.rows * (t.dim or 0) for t in spec.model.table_list())
        self.num_parameters = in_tables + sum(p.numel() for p in model.dense.parameters())

    def input_waits(self) -> InputWaits:
        return InputWaits(self.world.device)

    def profiler(self) -> Profiler:
        return Profiler(self.world.device)

    def feed(self, source: Source, start_step: int, stop_step: int) -> AbstractContextManager[Iterator[Any]]:
        part = Part(self.spec.train.batch_size, self.world.rank, self.world.world_size, start_step, stop_step)
        return self.engine.feed(source, part)

    def step(self, batches: Iterator[Any], step: int) -> float:
        """Train on the next batch; returns the tables' learning rate."""
        rate = self.optimizers.set_rates(step)
        self.engine.step(batches, step)
        return rate

    def window_metrics(self) -> dict[str, float]:
        return self.window.take(self.world)

    def trouble(self) -> Trouble | None:
        return self.engine.trouble()

    @contextmanager
    def evaluating(self, step: int) -> Iterator[Evaluator]:
        """The model in evaluation mode. Fused Adam counts its lookups as steps, hence `step`, to be set again."""
        with self.engine.evaluating() as model:
            yield Evaluator(model, self.world, ToDevice([t.name for t in self.spec.model.table_list()],
                                                        self.world.device))
        self.optimizers.set_step(step)

    def checkpointer(self, run_dir: RunDir) -> TorchCheckpointer:
        return TorchCheckpointer(run_dir, self)

    def peak_bytes(self) -> int:
        """What the run uses of the device, libraries included; on a CPU, this process's peak."""
        if self.world.device.type != "cuda":
            return peak_resident_bytes()
        free, total = torch.cuda.mem_get_info(self.world.device)
        return int(total - free)


class Evaluator:
    """Counts the model's predictions on held-out batches."""

    def __init__(self, model: DistributedModelParallel, world: World, to_device: ToDevice) -> None:
        self._model, self._world, self._to_device = model, world, to_device
        self._window = MetricWindow(world.device)

    def add(self, batch: Batch) -> None:
        _, (_, logits, label) = self._model(self._to_device(batch).to(self._world.device, non_blocking=True))
        self._window.add(logits[: batch.num_samples], label[: batch.num_samples])

    def state(self) -> F64:
        return self._window.state(self._world).cpu().numpy()
