"""The model of a spec, sharded over the ranks, with its optimizers and its engine."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torchrec.distributed.model_parallel import DistributedModelParallel

from embark.data import Batch, SampleSource
from embark.data.item_catalog import next_items
from embark.data.synthetic import SyntheticSource
from embark.errors import EmbarkError
from embark.model.engine_selection import (
    choose_precision,
    cpu_has_matrix_bf16,
    cuda_graph_obstacle,
    gpu_has_matrix_bf16,
    select_engine,
)
from embark.model.steps import EVAL_SAMPLES
from embark.model.work import TRACED
from embark.run.evaluation import Trouble
from embark.run.host import peak_resident_bytes
from embark.spec import ModelSpec, PlaceSpec, RunSpec, TrainSpec
from embark.spec.tasks import list_size_of
from embark.store import RunDir
from embark.store.run_dir import compiled_code_folder
from .batch import DeviceBatch, ToDevice, pinned
from .checkpoint import TorchCheckpointer
from .cpu_lookup import use_fast_cpu_lookup, use_lookup_of_bf16
from .device_samples import DeviceDrawnSource
from .dynamic.tables import DynamicTables
from .engines.pipeline import BatchRange, Engine, EngineInputs, PipelineEngine
from .metrics import HeldOut, MetricWindow
from .model import Recommender, SequenceRecommender, WithoutValues, fill_tables
from .networks.layers import center_units, seed_dropout
from .networks.sequences import NextItem
from .networks.trace_network import trace_network
from .next_items import NextItemEvaluator
from .optimizers import fuse_into_backward, make_optimizers
from .phases import InputWaits, Profiler
from .sharding import (
    describe,
    has_tables_on_the_host,
    make_plan,
    make_sharders,
    sharded_collections,
    sharded_tables,
)
from .task_metrics import TaskHeldOut, TaskWindow
from .two_tower import RetrievalEvaluator, SoftmaxWindow, TwoTowers, negatives_adder, read_catalog
from .world import World, explain, join

NUM_FIRST_ROWS = 8192
"""Training rows that say where the dense columns lie when the weights are initialized."""


def use_frequencies(network: NextItem, spec: RunSpec, source: SampleSource, device: torch.device) -> None:
    """Tell the network how often each item is in the log, where negatives go by that."""
    how = spec.data.interactions.negatives
    catalog, counts = getattr(source, "catalog", None), getattr(source, "counts", None)
    if how == "uniform" or catalog is None or counts is None:
        return
    frequency = np.full(spec.model.feature(spec.model.sequence.history).rows, 1 / counts.sum())
    frequency[catalog] = counts / counts.sum()
    network.log_frequency = torch.from_numpy(np.log(frequency)).float().to(device)
    if how == "in_batch":
        network.num_in_batch = spec.model.feature(spec.model.sequence.negatives).multi_hot


class TorchTrainer:
    """Builds in the order TorchRec needs: optimizer into backward, plan, shard, fill, engine."""

    def __init__(self, spec: RunSpec, world: World, num_steps: int, source: SampleSource) -> None:
        self.spec, self.world = spec, world
        torch.manual_seed(spec.train.seed)
        self.precision = precision_on(spec.train, world.device)
        set_matmul_precision(self.precision)
        if spec.model.has_sequences and world.device.type == "cuda":
            use_deterministic_kernels()
        is_bf16, is_retrieval = self.precision == "bf16", spec.model.kind == "two_tower"
        self.catalog = read_catalog(spec, source, world) if is_retrieval else None
        self.items = next_items(source, spec.model) if spec.model.is_next_item else None
        kind = SequenceRecommender if spec.model.has_sequences else Recommender
        model = TwoTowers(spec, world, self.catalog, is_bf16=is_bf16) if self.catalog else \
            kind(spec.model, spec.train, world.device, is_bf16=is_bf16)
        if isinstance(model.dense, NextItem):
            use_frequencies(model.dense, spec, source, world.device)
        bottom = getattr(model.dense, "bottom", None)
        num_rows = 0 if spec.stream.is_on else min(NUM_FIRST_ROWS, source.num_train_samples)
        if spec.train.dense_init == "centered" and num_rows and isinstance(bottom, nn.Sequential):
            center_units(bottom, torch.from_numpy(source.train_rows(0, 0, num_rows).dense.copy()).to(world.device))
        for tables in filter(None, (model.tables, getattr(model, "sequences", None))):
            fuse_into_backward(tables, spec)
        sharders = make_sharders(spec)
        plan = make_plan(model, sharders, spec, world)
        with WithoutValues():
            self.model = DistributedModelParallel(model, device=world.device, plan=plan, sharders=sharders)
        lookups = (lookup for tables in sharded_collections(self.model) for lookup in tables._lookups)
        for wrapper in (self.model._dmp_wrapped_module, *lookups):
            if isinstance(wrapper, DistributedDataParallel):
                # Else it lays its buckets out anew after the first step, and sums over more than two ranks round
                # otherwise from then on: a resumed run would not be, bit for bit, the one that was never interrupted.
                wrapper.reducer._push_all_rebuilt_params()
        for tables in sharded_collections(self.model):
            fill_tables(tables, spec.model, spec.train.seed)
        if world.device.type == "cpu":
            use_fast_cpu_lookup(self.model)
        else:
            use_lookup_of_bf16(self.model)
        self.optimizers = make_optimizers(self.model, spec, num_steps, world.device)
        # What the engine counts its predictions in.
        self.window = TaskWindow(spec.model.tasks, world.device) if spec.model.tasks else \
            (SoftmaxWindow if self.catalog else MetricWindow)(world.device)
        if spec.model.is_custom:
            TRACED[spec.model] = trace_network(spec.model)  # for the engine, and the prediction that the run logs
        self.dynamic = DynamicTables(spec, world, sharded_tables(self.model)) if spec.model.has_dynamic_tables else None
        self.engine = make_engine(EngineInputs(
            spec=spec, world=world, plan=plan, model=self.model, dense=model.dense, optimizers=self.optimizers,
            precision=self.precision, window=self.window,
            extend=negatives_adder(spec, self.catalog, world) if self.catalog else None, dynamic=self.dynamic,
        ), source)
        self.layout: dict[str, Any] = describe(plan, spec)
        in_tables = sum(t.rows * t.dim for t in spec.model.stored_tables())
        self.num_parameters = in_tables + sum(p.numel() for p in model.dense.parameters())

    def input_waits(self) -> InputWaits:
        return InputWaits(self.world.device)

    def profiler(self) -> Profiler:
        return Profiler(self.world.device)

    def feed(self, source: SampleSource, start_step: int, stop_step: int) -> AbstractContextManager[Iterator[Any]]:
        part = BatchRange(self.spec.train.batch_size, self.world.rank, self.world.world_size, start_step, stop_step)
        return self.engine.feed(source, part)

    def step(self, batches: Iterator[Any], step: int) -> float:
        """Train on the next batch; returns the tables' learning rate."""
        rate = self.optimizers.set_rates(step)
        if self.spec.model.dropout:
            first_sample = self.world.rank * (self.spec.train.batch_size // self.world.world_size)
            seed_dropout(self.model, self.spec.train.seed, step, first_sample)
        self.engine.step(batches, step)
        return rate

    def window_metrics(self) -> dict[str, Any]:
        return {**self.window.take(self.world), **(self.dynamic.metrics() if self.dynamic else {})}

    def trouble(self) -> Trouble | None:
        return self.engine.trouble()

    @contextmanager
    def evaluating(self, step: int) -> Iterator[Evaluator | RetrievalEvaluator | NextItemEvaluator]:
        """Give the model in evaluation mode.

        Fused Adam counts its lookups as steps, so `step` is set again afterwards.
        """
        with self.engine.evaluating() as model:
            to_device = ToDevice([t.name for t in self.spec.model.table_list()], self.world.device,
                                 self.spec.model.table_list())
            if self.catalog:
                yield RetrievalEvaluator(model, self.spec, self.world, self.catalog)
            elif self.items is not None:
                yield NextItemEvaluator(model, self.spec.model, self.world, to_device, self.items)
            else:
                yield Evaluator(model, self.world, self._by_row(to_device), self.spec.model)
        self.optimizers.set_step(step)

    def _by_row(self, to_device: ToDevice) -> Callable[[Batch], DeviceBatch]:
        """Return a function that also replaces the ids of dynamic tables by rows."""
        dynamic = self.dynamic
        return to_device if dynamic is None else lambda batch: to_device(dynamic.look_up(batch))

    def checkpointer(self, run_dir: RunDir) -> TorchCheckpointer:
        return TorchCheckpointer(run_dir, self)

    def peak_bytes(self) -> int:
        """Return what the run uses of the device, libraries included; on a CPU, this process's peak."""
        if self.world.device.type != "cuda":
            return peak_resident_bytes()
        free, total = torch.cuda.mem_get_info(self.world.device)
        return int(total - free)


class Evaluator:
    """Counts the model's predictions on held-out batches."""

    def __init__(self, model: DistributedModelParallel, world: World, to_device: Callable[[Batch], DeviceBatch],
                 spec: ModelSpec) -> None:
        self._model, self._world, self._to_device, self._tasks = model, world, to_device, spec.tasks
        self._held_out = TaskHeldOut(spec.tasks, world) if spec.tasks else HeldOut(world)
        self._is_drawn_there = not spec.tasks and not spec.has_weighted_ids
        # A long history is a batch by itself, and lists of rows are whole in a batch of training.
        self._must_be_small = world.device.type != "cuda" or spec.has_sequences or list_size_of(spec.tasks) > 1

    def eval_source(self, source: SampleSource) -> SampleSource:
        if self._world.device.type != "cuda" or type(source) is not SyntheticSource or not self._is_drawn_there:
            return source
        return DeviceDrawnSource(source, self._world.device)

    def batch_size(self, of_training: int) -> int:
        """Return, on a GPU, as many samples as keep it busy and take little of its memory, whatever a step trains on.
        """
        return of_training if self._must_be_small else EVAL_SAMPLES * self._world.world_size

    def add(self, batch: Batch) -> None:
        _, (_, logits, label) = self._model(self._to_device(batch).to(self._world.device, non_blocking=True))
        self._held_out.add(logits[: batch.num_samples], label[: batch.num_samples])

    def metrics(self) -> dict[str, Any]:
        held_out = self._held_out
        found: dict[str, Any] = dict(held_out.metrics())
        return {**found, "score_counts": held_out.score_counts()} if isinstance(held_out, HeldOut) else found


def precision_on(train: TrainSpec, device: torch.device) -> str:
    """Return `fp32`, `tf32` or `bf16`."""
    is_gpu = device.type == "cuda"
    has_bf16 = gpu_has_matrix_bf16(torch.cuda.get_device_capability(device)) if is_gpu else cpu_has_matrix_bf16()
    return choose_precision(train, has_matrix_bf16=has_bf16)


def set_matmul_precision(precision: str) -> None:
    """Let fp32 matrix products use TF32, or forbid it."""
    torch.set_float32_matmul_precision("highest" if precision == "fp32" else "high")


def use_deterministic_kernels() -> None:
    """Sum PyTorch's own gradients of gathered rows in the same order in every run, not by atomics.

    The captured step of other models, and all tables, need none of this.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False


class TorchBackend:
    """TorchRec on CPUs and NVIDIA GPUs."""

    def join(self, place: PlaceSpec) -> AbstractContextManager[World]:
        return join(place)

    def allocator(self, world: World) -> Callable[[int], NDArray[np.uint8]] | None:
        return pinned(world.device)

    def build(self, spec: RunSpec, world: World, num_steps: int, source: SampleSource, run_dir: RunDir) -> TorchTrainer:
        # Triton names what it keeps by its source, its own version and the GPU.
        folder = compiled_code_folder("triton", run_dir.path.absolute() / "cache" / "triton")
        os.environ.setdefault("TRITON_CACHE_DIR", str(folder))
        return TorchTrainer(spec, world, num_steps, source)

    def explain(self, error: Exception) -> EmbarkError | None:
        return explain(error)


def make_engine(inputs: EngineInputs, source: SampleSource) -> Engine:
    """Return the engine that `train.engine` asks for, or the one that `auto` chooses."""
    spec, device = inputs.spec, inputs.world.device.type
    on_host = has_tables_on_the_host(inputs.plan)
    obstacle = cuda_graph_obstacle(spec, device, has_tables_on_host=on_host, num_ranks=inputs.world.world_size)
    if device == "cuda" and not obstacle:
        from .engines.cuda_graph.engine import capture_obstacle

        obstacle = capture_obstacle(inputs)
    engine, reason = select_engine(spec, device, obstacle)
    if engine == "pipeline":
        if on_host:
            reason += ", and their rows are fetched one batch ahead"
        return PipelineEngine(inputs, f"TorchRec's pipeline; {reason}", must_prefetch=on_host)
    from .engines.cuda_graph.engine import make_cuda_graph_engine

    return make_cuda_graph_engine(inputs, source, reason)
