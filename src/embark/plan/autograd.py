"""What the pipeline's step holds at its peak, counted: the forward and backward pass of the dense network, as
trainers/torch/networks/dlrm.py computes them and autograd keeps what it needs."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import lru_cache
from itertools import count

from embark.model.work import Layers, Linear
from embark.spec import RunSpec

FLOAT = 4
THREADS_PER_SM = 2048
SMS = 132  # The multiprocessors of an H200, which bound how many blocks a sum over a batch is cut into.


@dataclass(slots=True)
class Memory:
    """Bytes of tensors: those alive now, and the most at any time."""

    now: int = 0
    peak: int = 0
    written: int = 0  # Bytes that all operations together wrote.


def passes_of(spec: RunSpec, layers: Layers, num_samples: int, size: int) -> Memory:
    """Return the peak bytes of one rank's forward and backward pass; tables of one pooling are a group."""
    poolings = [table.pooling for table in spec.model.table_list()]
    in_groups = sorted(poolings, key=list(dict.fromkeys(poolings)).index)
    width = sum(table.max_width for table in spec.model.table_list())
    return both_passes(layers, width, num_samples, size, is_reordered=in_groups != poolings)


@lru_cache(maxsize=4096)
def both_passes(
    layers: Layers, pooled_width: int, num_samples: int, size: int, *, is_reordered: bool = False
) -> Memory:
    """Count both passes, without the features themselves.

    `size` is of a value that layers compute with; pooled rows are fp32. `is_reordered`: the tables' groups do not give
    their vectors in the model's order.
    """
    memory = Memory()
    network = _Network(memory, num_samples, size)
    rows = network.leaf(pooled_width)  # TorchRec refers to them until the step is over
    pooled = network.copy(rows) if is_reordered else rows
    output = (network.cross if layers.up else network.dot)(layers, pooled)
    del pooled  # the forward pass is over: what is left is what autograd saved
    _walk_back(memory, output)
    return memory


def _sum_bytes(width: int, num_samples: int) -> int:
    """Return what torch sets aside to sum the rows of a batch for the gradient of a bias
    (ATen/native/cuda/Reduce.cuh)."""
    vector = 4 if width % 4 == 0 else 2 if width % 2 == 0 else 1
    num_threads = 512 // vector
    columns, rows = min(_power_below(width // vector), num_threads), min(_power_below(num_samples), num_threads)
    block_x = min(columns, 32)
    block_y = min(rows, num_threads // block_x)
    block_x = min(columns, num_threads // block_y)
    in_thread = -(-num_samples // block_y)
    num_blocks = -(-width // (block_x * vector))
    most = SMS * (THREADS_PER_SM // (block_x * block_y))
    if in_thread < min(16 * block_y, 256) or num_blocks > most:
        return 0
    cut = max(min(-(-most // num_blocks), -(-in_thread // 16)), -(-in_thread // 256))
    return FLOAT * width * cut * block_x * vector if cut > 1 else 0


def _power_below(number: int) -> int:
    return 1 << max(0, number.bit_length() - 1)


class _Block:
    """Memory that counts as long as something refers to it, as a tensor's does."""

    __slots__ = ("memory", "num_bytes")

    def __init__(self, memory: Memory, num_bytes: int) -> None:
        self.memory, self.num_bytes = memory, num_bytes
        memory.now += num_bytes
        memory.written += num_bytes
        memory.peak = max(memory.peak, memory.now)

    def __del__(self) -> None:
        self.memory.now -= self.num_bytes


@dataclass(slots=True)
class _Node:
    """An operation of the backward pass. `made` has the bytes of the gradient for each source; None for one that wants
    none."""

    number: int
    sources: tuple[_Node | None, ...]
    made: tuple[int, ...]
    saved: tuple[_Block, ...]
    scratch_bytes: int
    passes: _Passes


class _Passes(Enum):
    """Records what each operation gives its sources: gradients of their own, the one that came, or views of parts of
    it."""

    NEW, SAME, VIEWS = range(3)


@dataclass(slots=True)
class _Tensor:
    block: _Block
    width: int
    size: int
    node: _Node | None = None

    @property
    def num_bytes(self) -> int:
        return self.block.num_bytes


@dataclass(slots=True)
class _Network:
    """The dense network; references are dropped where Python drops them in the network's own code."""

    memory: Memory
    num_samples: int
    size: int
    numbers: Iterator[int] = field(default_factory=count)

    def leaf(self, width: int) -> _Tensor:
        return self._new(width, FLOAT, ())

    def copy(self, values: _Tensor) -> _Tensor:
        """Copy a tensor into another order; its gradient is copied too."""
        return self._new(values.width, values.size, (values,))

    def dot(self, layers: Layers, pooled: _Tensor) -> _Tensor:
        passed_on = pooled
        if layers.bottom:
            passed_on = self._mlp(self._dense(layers), layers.bottom)
            pooled = self._cat(passed_on, self._cast(pooled, self.size))
        dots = self._dots(pooled, layers.num_vectors)
        return self._top(layers, self._cat(passed_on, dots))

    def cross(self, layers: Layers, pooled: _Tensor) -> _Tensor:
        first = self._cat(self._mlp(self._dense(layers), layers.bottom), pooled) if layers.bottom else pooled
        crossed = first
        for down, up in zip(layers.down, layers.up, strict=True):
            product = self._product(first, self._linear(self._linear(crossed, down), up))
            crossed = self._new(product.width, product.size, (product, crossed), _Passes.SAME)
            del product
        return self._top(layers, crossed)

    def _top(self, layers: Layers, values: _Tensor) -> _Tensor:
        """Run the layers of several tasks one after another; in the network they stand side by side."""
        *hidden, last = layers.top or layers.head
        return self._linear(self._mlp(values, hidden), last)

    def _mlp(self, values: _Tensor, layers: Sequence[Linear]) -> _Tensor:
        for layer in layers:
            values = self._linear(values, layer)
            values = self._relu(values)
        return values

    def _new(self, width: int, size: int, sources: tuple[_Tensor, ...], passes: _Passes = _Passes.NEW,
             saved: tuple[_Block, ...] = (), scratch_bytes: int = 0) -> _Tensor:
        node = _Node(next(self.numbers), tuple(source.node for source in sources),
                     tuple(source.num_bytes for source in sources), saved, scratch_bytes, passes)
        return _Tensor(_Block(self.memory, size * width * self.num_samples), width, size, node)

    def _dense(self, layers: Layers) -> _Tensor:
        """Return the dense features, which want no gradient; their own bytes are counted with the batch."""
        return _Tensor(_Block(self.memory, 0), layers.bottom[0].num_in, FLOAT)

    def _linear(self, values: _Tensor, layer: Linear) -> _Tensor:
        values = self._cast(values, self.size)
        sum_bytes = _sum_bytes(layer.num_out, self.num_samples) if layer.has_bias else 0
        self.memory.written -= sum_bytes  # little of it is used
        return self._new(layer.num_out, self.size, (values,), saved=(values.block,), scratch_bytes=sum_bytes)

    def _relu(self, values: _Tensor) -> _Tensor:
        out = self._new(values.width, values.size, (values,))
        assert out.node is not None
        out.node.saved = (out.block,)
        return out

    def _cast(self, values: _Tensor, size: int) -> _Tensor:
        if values.size == size:
            return values
        new = self._new(values.width, size, (values,))
        if values.node is None:
            new.node = None
        return new

    def _cat(self, *parts: _Tensor) -> _Tensor:
        size = max(part.size for part in parts)
        cast = tuple(self._cast(part, size) for part in parts)
        return self._new(sum(part.width for part in cast), size, cast, _Passes.VIEWS)

    def _product(self, first: _Tensor, values: _Tensor) -> _Tensor:
        return self._new(first.width, first.size, (first, values), saved=(first.block, values.block),
                         scratch_bytes=first.num_bytes if values.size != first.size else 0)

    def _dots(self, vectors: _Tensor, num_vectors: int) -> _Tensor:
        vectors = self._cast(vectors, self.size)
        cells = self.size * num_vectors**2 * self.num_samples
        scratch = _Block(self.memory, cells)
        dots = self._new(num_vectors * (num_vectors - 1) // 2, self.size, (vectors,), saved=(vectors.block,),
                         scratch_bytes=cells)
        del scratch
        return dots


def _walk_back(memory: Memory, output: _Tensor) -> None:
    """Run the backward pass, the latest operation first.

    A tensor's second gradient is added to its first in place, unless that is a view.
    """
    assert output.node is not None
    ready = [(-output.node.number, output.node)]
    gradients = {output.node.number: output.block}
    views = set[int]()
    while ready:
        _, node = heapq.heappop(ready)
        gradient = gradients.pop(node.number)
        scratch = _Block(memory, node.scratch_bytes)
        is_new = node.passes is _Passes.NEW
        found = [(source, _Block(memory, num_bytes) if is_new else gradient, num_bytes)
                 for source, num_bytes in zip(node.sources, node.made, strict=True) if source is not None]
        del gradient, scratch
        node.saved = ()
        while found:
            source, new, num_bytes = found.pop(0)
            if source.number not in gradients:
                gradients[source.number] = new
                heapq.heappush(ready, (-source.number, source))
                if node.passes is _Passes.VIEWS:
                    views.add(source.number)
            elif source.number in views:
                gradients[source.number] = _Block(memory, num_bytes)
                views.remove(source.number)
            del new
