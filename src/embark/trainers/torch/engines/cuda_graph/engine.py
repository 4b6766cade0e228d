"""The complete step as one CUDA graph: lookups, dense layers forward and backward, optimizers, metrics.

On a CPU, or over gloo, the step runs operation by operation, so its numbers can be checked without a GPU.
"""

import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from itertools import accumulate, cycle
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from embark.data import SampleSource
from embark.data.dynamic_ids import NO_ID
from embark.data.prepared.source import PreparedSource
from embark.data.synthetic import SyntheticSource
from embark.model.steps import dense_rate
from embark.model.work import DENSE_STATES
from embark.run.evaluation import Trouble
from embark.spec import RunSpec
from embark.trainers.torch.dynamic.tables import DynamicTables, IdExchange
from embark.trainers.torch.engines.pipeline import BatchRange, Engine, EngineInputs
from embark.trainers.torch.metrics import MetricWindow
from embark.trainers.torch.networks.custom_model import CustomNetwork
from embark.trainers.torch.optimizers import table_rates
from embark.trainers.torch.sharding import sharded_collections
from embark.trainers.torch.world import CAPTURED, World
from . import FEW_SAMPLES
from .batch_layout import (
    BatchBuffer,
    BatchLayout,
    DrawnLayout,
    PackedLayout,
    RawLayout,
    SequenceLayout,
    pooled_tables,
)
from .compile_kernels import compile_in_parallel
from .exchange import Exchange, Sizes, wire_dtype
from .flat_parameters import FlatDense, FlatParameters
from .lookup import (
    Device,
    FbgemmLookup,
    KernelLookup,
    LocalShard,
    Lookup,
    LookupPlan,
    Shard,
    divides_itself,
    local_shards,
    planned,
    why_not_by_kernels,
)
from .network import (
    AutogradNetwork,
    Network,
    autograd_network,
    num_rows,
    why_not_captured,
)
from .ops import TorchOps, gpu_ops

NO_STEP = torch.iinfo(torch.int64).max


class CudaGraphEngine(Engine):
    """Runs steps in memory that never moves."""

    name = "cuda_graph"

    def __init__(
        self, inputs: EngineInputs, shards: list[Shard], local: list[LocalShard], layout: BatchLayout, reason: str
    ) -> None:
        super().__init__(inputs, reason)
        self._window = inputs.window
        self._inputs, self._shards, self._local, self.layout = inputs, shards, local, layout
        self._tables = inputs.spec.model.table_list()
        self._device = inputs.world.device
        self._is_gpu = self._device.type == "cuda"
        full_rates = table_rates(inputs.spec)
        self._full_rates = sorted(set(full_rates.values()))
        self._rate_of = {name: self._full_rates.index(rate) for name, rate in full_rates.items()}
        self._rates = StepRates(self._rates_at, self._device)
        self._step = torch.zeros(1, dtype=torch.int64, device=self._device)
        self._bad_id, self._bad_loss = (torch.full_like(self._step, NO_STEP) for _ in range(2))
        self._slots = [torch.zeros(layout.size_bytes, dtype=torch.uint8, device=self._device) for _ in range(2)]
        self._is_small = inputs.spec.train.batch_size // inputs.world.world_size <= FEW_SAMPLES
        self._streams = Streams(self._device, is_main_first=self._is_small) if self._is_gpu else None
        self._graphs: list[list[torch.cuda.CUDAGraph]] = []  # Graphs by slot, and by the batch's number in it.
        self._filled: BatchBuffer | None = None  # The batch in the active slot.
        self._following: BatchBuffer | None = None  # The batch that is being copied into the other slot.
        self._slot = self._number = 0
        self._measured: dict[int, Tensor] = {}  # What two kernels hand each other, by the number of predictions.
        self._is_built = False

    def feed(self, source: SampleSource, part: BatchRange) -> AbstractContextManager[Iterator[BatchBuffer]]:
        """Yield batches in memory that the device copies from: raw bytes where the source has them, else packed
        batches.

        Synthetic samples are drawn on the device.
        """
        return self.layout.feed(source, part, self._device)

    def step(self, batches: Iterator[BatchBuffer], step: int) -> None:
        """Train on the next batch, and count it in the window."""
        is_first = not self._is_built
        if is_first:
            self._build(step)
        self._set_values(step)
        self._next_batch(batches)
        if is_first and self._is_gpu and isinstance(self._inputs.dense, CustomNetwork):
            self._check_first()
        num_predictions = self._run()
        if self._number == 0:
            self._fetch_following(batches)
        self._window.count(num_predictions)

    def _run(self) -> int:
        """Train on the batch in the active slot; returns how many predictions the window has counted."""
        if self._streams is None:
            self._body(self._slot, self._number)
        else:
            self._graphs[self._slot][self._number].replay()
        return len(self._network.logits)

    def settle(self, step: int) -> None:
        """Bring the optimizer's own state to where it would be had it done the steps, before a checkpoint."""
        if self._is_built:
            self._flat.set_count(step)

    def trouble(self) -> Trouble | None:
        """Return what went wrong on the device, the first step it did, and the table; waits for the device."""
        bad_id, bad_loss = int(self._bad_id), int(self._bad_loss)
        if bad_id != NO_STEP:
            table = self._tables[self._plans[bad_id & 0xFFFFF].local.shard.feature]
            return "id", bad_id >> 20, table.name
        return ("loss", bad_loss, "") if bad_loss != NO_STEP else None

    def _next_batch(self, batches: Iterator[BatchBuffer]) -> None:
        """Advance `slot` and `number` to the next batch."""
        self._number += 1
        if self._filled is not None and self._number < self._filled.num_batches:
            return
        if self._filled is None:
            self._fetch_following(batches)
        if self._following is None:
            raise StopIteration
        if self._streams is not None:
            self._streams.done[self._slot].record(torch.cuda.current_stream())
        self._filled, self._slot, self._number = self._following, 1 - self._slot, 0
        if self._streams is not None:
            torch.cuda.current_stream().wait_event(self._streams.copied[self._slot])
        self._filled.correct(self._slots[self._slot])

    def _fetch_following(self, batches: Iterator[BatchBuffer]) -> None:
        """Start to copy the batches that come next, while the step before runs."""
        self._following = next(batches, None)
        if self._following is not None:
            self._copy(self._following, 1 - self._slot)

    def _copy(self, filled: BatchBuffer, slot: int) -> None:
        """Copy batches into a slot as soon as the step that read it last is done."""
        if self._streams is None:
            filled.write(self._slots[slot])
            filled.release(None)
            return
        streams = self._streams
        with torch.cuda.stream(streams.copy):
            streams.copy.wait_event(streams.done[slot])
            filled.write(self._slots[slot])
            streams.copied[slot].record(streams.copy)
            event = torch.cuda.Event()
            event.record(streams.copy)
        filled.release(event)

    def _set_values(self, step: int) -> None:
        """Set the values that a graph cannot know when it is captured: learning rates, and the keys of dropout
        masks."""
        self._rates.upload_rates(step)
        self._network.set_keys()
        self._lookup.set_rates(self._rates_at(step))

    def _rates_at(self, step: int) -> list[float]:
        """Return the rates of tables, then that of the dense layers."""
        factor = self._inputs.optimizers.factor(step)
        return [full * factor for full in (*self._full_rates, dense_rate(self._inputs.spec.train))]

    def _build(self, step: int) -> None:
        """Make all buffers and capture the step; the parameters are as a checkpoint may have left them."""
        inputs, spec, world = self._inputs, self._inputs.spec, self._inputs.world
        self._num_samples = num_rows(spec) // world.world_size
        dtype = torch.bfloat16 if inputs.precision == "bf16" else torch.float32
        self._ops = gpu_ops() if self._is_gpu and dtype == torch.bfloat16 else TorchOps()
        self._make_network(dtype)
        pooled = {table.name for table in pooled_tables(spec.model)}
        of_tables = [(t.multi_hot, t.dim or 0) if t.name in pooled else (0, 0) for t in self._tables]
        sizes = Sizes(self._num_samples, tuple(ids for ids, _ in of_tables), tuple(width for _, width in of_tables))
        self._exchange: Exchange | None = None
        if needs_exchange(world):
            self._exchange = Exchange(self._shards, sizes, world.rank, world.world_size, self._device,
                                      wire_dtype(spec, self._shards, self._network.pooled.dtype))
        self._lookup = self._make_lookup(sizes)
        self._mean_features = [
            (sizes.id_starts[f], sizes.num_ids[f], sizes.columns[f], sizes.widths[f])
            for f, table in enumerate(self._tables)
            if table.pooling == "mean" and table.multi_hot > 1 and self._must_divide(f)
            and not spec.model.has_weighted_ids  # whose factors divide
        ]
        self._dynamic = DynamicStep(inputs.dynamic, sizes, world) if inputs.dynamic else None
        self._step.fill_(step - 1)  # which the step begins by counting
        if self._is_gpu:
            self._capture()
        self._is_built = True

    def _make_network(self, dtype: torch.dtype) -> None:
        inputs, train = self._inputs, self._inputs.spec.train
        self._network: Network | AutogradNetwork
        self._flat: FlatParameters
        if inputs.spec.model.goes_back_by_autograd:
            self._network = own = autograd_network(inputs, self.layout)
            self._flat = own.flat(inputs, dtype)
            self._flat.adopt()
            if isinstance(inputs.dense, CustomNetwork):
                inputs.dense.checks_values = not self._is_gpu
            return
        if DENSE_STATES[inputs.optimizers.dense_kind] and not inputs.optimizers.dense.state:
            inputs.optimizers.init_state()
        self._flat = flat = FlatDense(inputs.dense, inputs.optimizers, dtype,
                                      self._ops.num_portions(self._num_samples), train)
        flat.adopt()
        self._network = Network(inputs.dense, flat, self._ops, self._num_samples, train.batch_size,
                                self._fork(*WEIGHTS[: 1 + self._is_small]))

    def _check_first(self) -> None:
        """Look for NaN that the user's file makes, on the batch of the first step, before any weight has it."""
        network = self._network
        assert isinstance(network, AutogradNetwork)
        dense, ids, _ = self.layout.decode(self._slots[self._slot], self._number)
        network.inputs.copy_(dense)
        exchange = self._exchange
        ids = ids if self._dynamic is None else self._dynamic(ids, None)
        factors = self._factors(self._slot)
        self._lookup.forward(exchange.ids(ids) if exchange else ids, exchange.looked_up if exchange else network.pooled,
                             exchange.ids(factors) if exchange and factors is not None else factors)
        if exchange:
            exchange.pooled(network.pooled)
        self._divide(ids, network.pooled)
        network.check_values()
        self._bad_id.fill_(NO_STEP)  # the step itself notes it, with its number

    def _make_lookup(self, sizes: Sizes) -> Lookup:
        self._plans = self._make_plans(sizes)
        exchange = self._exchange
        return self._lookup_of(self._plans, exchange.num_global if exchange else sizes.num_samples)

    def _lookup_of(self, plans: Sequence[LookupPlan], num_samples: int) -> FbgemmLookup | KernelLookup:
        spec = self._inputs.spec
        if not self._is_gpu:
            return FbgemmLookup(plans, num_samples, rounding_seed(spec), self._step)
        seed = torch.tensor([rounding_seed(spec)], device=self._device)
        return KernelLookup(plans, num_samples, Device(self._rates.now, self._step, self._bad_id, seed),
                            spec.train.eps, spec.train.embedding_l2 / num_rows(spec),
                            has_factors=spec.model.has_weighted_ids)

    def _make_plans(self, sizes: Sizes) -> list[LookupPlan]:
        exchange, spec = self._exchange, self._inputs.spec
        stored = spec.model.stored_tables()
        ends = accumulate(table.rows for table in stored)
        first_numbers = {table.name: end - table.rows for table, end in zip(stored, ends, strict=True)}
        plans: list[LookupPlan] = []
        column = 0
        for one in self._local:
            feature = one.shard.feature
            table = self._tables[feature]
            at = exchange.id_starts[feature] if exchange else sizes.id_starts[feature]
            to = column if exchange else sizes.columns[feature] + one.shard.first_column
            plans.append(LookupPlan(
                one, at, sizes.num_ids[feature], table.stored_rows, to, number=len(plans),
                rate=self._rate_of[table.weights], first_number=first_numbers[table.weights],
            ))
            column += one.shard.num_columns
        return plans

    def _must_divide(self, feature: int) -> bool:
        """Return whether the engine has to turn a feature's sums into means.

        FBGEMM divides whole tables itself, on a CPU; but a rank without the table has nobody to ask, and those with a
        part of its rows know a part of the ids only.
        """
        if self._is_gpu:
            return True
        shards = [s for s in self._shards if s.feature == feature]
        is_split = any(s.num_rows < self._tables[feature].stored_rows for s in shards)
        mine = [one for one in self._local if one.shard.feature == feature]
        return is_split or any(not divides_itself(one) for one in mine)

    def _capture(self) -> None:
        """Record the step for each batch of each slot."""
        self._warm_up(0)
        pool = None
        for slot in range(2):
            self._graphs.append([])
            for number in range(self.layout.max_batches):
                self._graphs[slot].append(self._recorded(slot, number, pool))
                pool = self._graphs[0][0].pool()

    def _recorded(self, slot: int, number: int, pool: Any) -> torch.cuda.CUDAGraph:
        """Record the step, in memory of `pool` if there is one already."""
        assert self._streams is not None
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool, stream=self._streams.main, capture_error_mode="thread_local"):
            self._body(slot, number)
        CAPTURED.add(graph)
        return graph

    def _warm_up(self, slot: int) -> None:
        """Run with no id at all, so that kernels are compiled and no table is touched, and nothing else changes."""
        flat, window = self._flat, self._window
        changed = (flat.master, flat.state, flat.second_state, flat.shadow, self._step, self._bad_loss)
        kept = [t.clone() for t in changed]
        own = self._network if isinstance(self._network, AutogradNetwork) else None
        window_kept = window.clone_sums()
        streams = self._streams
        assert streams is not None
        with own.undone() if own else nullcontext():
            streams.main.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(streams.main):
                # Not for custom networks, whose code may depend on what its kernels return, nor beside other ranks.
                if not (own or self._dynamic or self._exchange):
                    compile_in_parallel(self._call_kernels)
                for _ in range(2):
                    self._body(slot, 0, has_ids=False)
            torch.cuda.current_stream().wait_stream(streams.main)
        for tensor, before in zip(changed, kept, strict=True):
            tensor.copy_(before)
        window.set_sums(window_kept)
        torch.cuda.synchronize()

    def _call_kernels(self) -> None:
        """Launch every kernel of a step, and those that draw samples."""
        if isinstance(self.layout, DrawnLayout):
            self.layout.call_kernels(self._slots[0])
        self._body(0, 0, has_ids=False)

    def _body(self, slot: int, number: int, *, has_ids: bool = True) -> None:
        """Run one step."""
        network, exchange, flat = self._network, self._exchange, self._flat
        train = self._inputs.spec.train
        if self._streams is not None:
            self._streams.opened.clear()
        dense, ids, label = self.layout.decode(self._slots[slot], number)
        if not has_ids:
            ids = torch.full_like(ids, -1 if ids.dtype == torch.int32 else NO_ID)
        self._rates.start(dense, network.inputs, self._step)
        looked_up, factors = network.pooled, self._factors(slot)
        if exchange:
            ids = self._rows_of(ids, has_ids=has_ids)
            wanted, looked_up = exchange.ids(ids), exchange.looked_up
            factors = None if factors is None else exchange.ids(factors)
        with self._fork("tables")():
            if not exchange:
                wanted = ids = self._rows_of(ids, has_ids=has_ids)
            self._lookup.forward(wanted, looked_up, factors)
        network.forward_bottom()
        self._join("tables")
        with self._fork("sort")():
            self._lookup.sort(exchange.grads if exchange else network.grad_pooled)
        if exchange:
            exchange.pooled(network.pooled)
        self._divide(ids, network.pooled)
        network.forward_rest()
        network.backward_to_pooled(label, ids)
        with self._fork("metrics")():
            self._measure(network.logits, network.counted(label) if isinstance(network, AutogradNetwork) else label)
        self._divide(ids, network.grad_pooled)
        if train.embedding_l2 and not self._is_gpu:  # there the update adds it, before anything is rounded
            network.grad_pooled.add_(network.pooled, alpha=train.embedding_l2 / num_rows(self._inputs.spec))
        grads = network.grad_pooled
        if exchange:
            exchange.send_grads(grads)
            grads = exchange.grads
            with self._fork("reduction")():  # while the tables are updated and the bottom layers go back
                self._join(*WEIGHTS)
                _sum_over_ranks(flat.early_grads)
        with self._fork("tables")():
            self._join("sort")
            self._lookup.backward(grads, self._fork("long_runs"))
        network.backward_bottom()
        flat.add_up(self._ops.add_up)
        self._join(*WEIGHTS)
        if exchange:
            self._join("reduction")
            _sum_over_ranks(flat.late_grads)
        flat.clip()
        self._join("tables", "long_runs", "metrics")  # before the last kernel: a graph that ends in several is slow
        self._ops.optimizer_step(flat.master, flat.indices, flat.grads, flat.shadow, flat.state, flat.second_state,
                                 self._rates.now[-1:], self._step, flat.decays, optimizer=train.dense_optimizer,
                                 eps=train.eps)

    def _factors(self, slot: int) -> Tensor | None:
        return self.layout.factors(self._slots[slot]) if isinstance(self.layout, PackedLayout) else None

    def _rows_of(self, ids: Tensor, *, has_ids: bool) -> Tensor:
        return ids if self._dynamic is None else self._dynamic(ids, self._step, has_ids=has_ids)

    def _divide(self, ids: Tensor, values: Tensor) -> None:
        """Turn sums into means, of rows and of gradients alike."""
        for start, num_ids, column, width in self._mean_features:
            counts = (ids[start : start + self._num_samples * num_ids].view(-1, num_ids) >= 0).sum(1).clamp(min=1)
            values[:, column : column + width] /= counts[:, None]

    def _measure(self, logits: Tensor, label: Tensor) -> None:
        """Count the batch in the window, and record a loss that is not finite."""
        if self._is_gpu and type(self._window) is MetricWindow:
            from . import step_kernels

            partial = self._measured.get(len(label))
            if partial is None:
                partial = torch.zeros(step_kernels.partial_shape(len(label)), device=self._device)
                self._measured[len(label)] = partial
            counts, sums = self._window.on_device
            step_kernels.measure(logits, label, counts, sums, partial, self._bad_loss, self._step)
            return
        if isinstance(self._window, MetricWindow) and self._inputs.spec.model.is_next_item:
            self._window.accumulate(logits, label.nan_to_num(), (~label.isnan()).float())
        else:
            self._window.accumulate(logits, label)
        is_bad = ~torch.isfinite(logits).all()
        torch.minimum(self._bad_loss, torch.where(is_bad, self._step, NO_STEP), out=self._bad_loss)

    def _fork(self, *names: str) -> Callable[[], Any]:
        """Return a function that opens a branch at each call, on the named streams in turns."""
        streams, turns = self._streams, cycle(names)
        if streams is None:
            return nullcontext
        return lambda: streams.branch(next(turns))

    def _join(self, *names: str) -> None:
        for name in names:
            if self._streams is not None and name in self._streams.opened:
                torch.cuda.current_stream().wait_stream(self._streams.named[name])


def needs_exchange(world: World) -> bool:
    """Return whether ranks exchange rows and gradients. A test makes it true for a single rank, to see NCCL
    captured."""
    return world.world_size > 1


def _sum_over_ranks(grads: Tensor) -> None:
    if grads.numel():
        dist.all_reduce(grads)


def capture_obstacle(inputs: EngineInputs) -> str:
    """Return why the step of any rank cannot be captured, by a look at its tables and a trial; empty if it can."""
    spec, world = inputs.spec, inputs.world
    obstacle = _any_obstacle(world, why_not_by_kernels(_local_shards(inputs)))
    if spec.model.goes_back_by_autograd and spec.train.engine != "pipeline" and not obstacle:
        obstacle = _any_obstacle(world, why_not_captured(inputs))
    return obstacle


def _any_obstacle(world: World, obstacle: str) -> str:
    return next(filter(None, world.gathered(obstacle)), "")


def _local_shards(inputs: EngineInputs) -> list[LocalShard]:
    return local_shards(sharded_collections(inputs.model), inputs.spec.model.table_list(), inputs.world.rank)


def make_cuda_graph_engine(inputs: EngineInputs, source: SampleSource, reason: str) -> CudaGraphEngine:
    """Choose how batches reach the device; `reason` says why this engine, for a person."""
    spec, tables = inputs.spec, inputs.spec.model.table_list()
    layout = _batch_layout(inputs, source)
    if isinstance(layout, RawLayout):
        reason += "; the device decodes the rows as they lie on disk"
    elif isinstance(layout, DrawnLayout):
        reason += "; the device draws the samples"
    is_fixed = isinstance(layout, RawLayout) or (spec.data.kind == "synthetic" and not spec.data.ragged)
    if not is_fixed and any(t.multi_hot > 1 for t in tables):
        reason += "; a sample with fewer ids than multi_hot is padded"
    kind: type[CudaGraphEngine] = CudaGraphEngine
    if isinstance(layout, SequenceLayout):
        from .sequence_engine import SequenceEngine

        kind = SequenceEngine
    return kind(inputs, planned(inputs.plan, tables), _local_shards(inputs), layout, reason)


def _batch_layout(inputs: EngineInputs, source: SampleSource) -> BatchLayout:
    """Choose raw bytes where the source has blocks of one shape for the tables of the model, synthetic samples drawn by
    the GPU, or packed batches, as several labels and sampled negatives need."""
    spec, world, tables = inputs.spec, inputs.world, inputs.spec.model.table_list()
    num_samples = num_rows(spec) // world.world_size
    if spec.model.has_sequences:
        return SequenceLayout(spec.model, num_samples)
    if spec.model.tasks or inputs.extend or spec.model.has_weighted_ids:
        return PackedLayout(num_samples, spec.model.num_dense, tuple(t.multi_hot for t in tables),
                            len(spec.model.tasks), inputs.extend, tables if spec.model.has_weighted_ids else (),
                            is_wide=spec.model.has_dynamic_tables)
    if isinstance(source, PreparedSource) and source.layout.is_fixed:
        stored = {f.name: f.multi_hot for f in source.layout.features}
        if all(stored.get(t.name) == t.multi_hot for t in tables):
            return RawLayout(source, [t.name for t in tables], num_samples, world.device)
    packed = PackedLayout(num_samples, spec.model.num_dense, tuple(t.multi_hot for t in tables))
    if isinstance(source, SyntheticSource) and world.device.type == "cuda":
        return DrawnLayout(source, packed, world.device)
    return replace(packed, is_wide=spec.model.has_dynamic_tables)


def rounding_seed(spec: RunSpec) -> int:
    """Seed of stochastic rounding."""
    return zlib.crc32(f"{spec.train.seed}/rounding".encode())


NUM_ROWS = 256  # Steps whose learning rates are uploaded together.


class StepRates:
    """Learning rates of the steps to come, on the device, so that nothing is launched between two steps to set them.

    `now` has the rates of the step that runs.
    """

    def __init__(self, rates_at: Callable[[int], Sequence[float]], device: torch.device) -> None:
        self._rates_at, self._is_gpu = rates_at, device.type == "cuda"
        self.now = torch.zeros(len(rates_at(0)), device=device)
        self._rows = torch.zeros(NUM_ROWS, len(self.now), device=device)  # Rates by step.
        self._first: int | None = None  # The step of the first row.

    def upload_rates(self, step: int) -> None:
        """Make sure that the rates of `step` are on the device."""
        first = step - step % NUM_ROWS
        if first != self._first:
            rows = torch.tensor([self._rates_at(one) for one in range(first, first + NUM_ROWS)])
            self._rows.copy_(rows.pin_memory() if self._is_gpu else rows, non_blocking=True)
            self._first = first

    def start(self, dense: Tensor, inputs: Tensor, step: Tensor) -> None:
        """Begin a step: count it, take its rates, and copy its dense features into the first columns of `inputs`."""
        if self._is_gpu:
            from . import step_kernels

            step_kernels.start(dense, inputs, step, self._rows, self.now)
            return
        step += 1
        self.now.copy_(self._rows[int(step) % NUM_ROWS])
        inputs[:, : dense.shape[1]] = dense


class DynamicStep:
    """Replaces the ids of dynamic tables by rows inside the captured step, where nothing is decided on the host."""

    def __init__(self, dynamic: DynamicTables, sizes: Sizes, world: World) -> None:
        self._dynamic, device = dynamic, world.device
        starts, num_ids = sizes.id_starts, [sizes.num_samples * num for num in sizes.num_ids]
        positions = torch.cat([torch.arange(starts[f], starts[f] + num_ids[f])
                            for of_table in dynamic.features for f in of_table])
        is_all = len(positions) == starts[-1] and bool((positions == torch.arange(len(positions))).all())
        self._positions = None if is_all else positions.to(device)
        self._exchange = IdExchange([[num_ids[f] for f in of_table] for of_table in dynamic.features], world)
        self._before_any = torch.zeros(1, dtype=torch.int64, device=device)

    def __call__(self, ids: Tensor, step: Tensor | None, *, has_ids: bool = True) -> Tensor:
        """Return rows; without `has_ids` there are none to replace, and without a step none to add: the map stays as it
        is."""
        own = ids if self._positions is None else ids.index_select(0, self._positions)
        rows = self._dynamic.rows(own, self._exchange, step if has_ids else self._before_any)
        if self._positions is None:
            return rows
        found = (torch.where(ids == NO_ID, -1, ids) if ids.dtype == torch.int64 else ids).to(torch.int32, copy=True)
        return found.index_copy_(0, self._positions, rows)


WEIGHTS = ("weights", "more_weights")  # Used in turns where a kernel's start takes as long as its work.
BRANCHES = (*WEIGHTS, "tables", "long_runs", "sort", "metrics", "reduction")


class Streams:
    """CUDA streams of one engine: one for the step, one that copies batches, and one for each branch."""

    def __init__(self, device: torch.device, *, is_main_first: bool) -> None:
        """`is_main_first`: the step's own stream goes first where the device has room for one more kernel."""
        self.main = torch.cuda.Stream(device, priority=-1 if is_main_first else 0)
        self.copy = torch.cuda.Stream(device)
        self.named = {name: torch.cuda.Stream(device) for name in BRANCHES}
        self.opened: set[str] = set()  # Branches of this step: a capture may not wait for others.
        self.copied = [torch.cuda.Event() for _ in range(2)]
        self.done = [torch.cuda.Event() for _ in range(2)]

    @contextmanager
    def branch(self, name: str) -> Iterator[None]:
        """Run work on a stream that waits for what came before, while nothing after waits for it."""
        stream = self.named[name]
        self.opened.add(name)
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            yield
