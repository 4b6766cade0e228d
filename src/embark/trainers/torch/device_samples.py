"""Synthetic samples drawn on the device, bit for bit those of `SyntheticSource`.

Integers, and sums, products and quotients of floats, are the same on every processor; powers and exponentials are not.
They decide an id and a label here only by comparison: where a comparison is closer than their errors, which happens
once in some million samples, the sample counts as uncertain, and the host draws it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from embark.data.hashing import FIRST, SECOND, STEP
from embark.data.loader import Batch
from embark.data.synthetic import (
    CURVATURE,
    DENSE,
    EVAL,
    HEAD,
    IDS,
    LABEL,
    LATENT_MEAN,
    LENGTHS,
    LOW,
    NUM_LATENT,
    Group,
    SyntheticSource,
)
from embark.model.batch import DRAWN_TOGETHER

ID_TOLERANCE = 2.0**-49
"""Relative, of float64 powers and exponentials: 8 units in the last place. NumPy's err by up to 4, CUDA's by 2."""
LABEL_TOLERANCE = 2.0**-20
"""Relative, of NumPy's probability: its float32 exponential errs by up to 2.6 units in the last place, the sum and the
quotient by half of one each, 2^−21 together."""


@dataclass(frozen=True, slots=True)
class Samples:
    """K batches of B samples, to be filled."""

    dense: Tensor  # [K, B, num_dense]
    ids: Tensor  # [K, …]: feature by feature [B, multi_hot]; −1 behind those of a sample with fewer.
    label: Tensor  # [K, B]


class DeviceSampler:
    """Draws on one device. Nothing waits for the device but `correct`."""

    def __init__(self, source: SyntheticSource, device: torch.device) -> None:
        self._source, self._device = source, device
        teacher, scales = source.teacher, source.scales
        self._groups = [_DeviceGroup(group, source, device) for group in source.groups]
        self._starts = np.cumsum([0, *source.multi_hot]).tolist()
        self._columns = torch.arange(source.num_dense, device=device)
        self._dense_weights = torch.from_numpy(teacher.dense_weights).to(device)
        self._table_scales = torch.from_numpy(scales.tables).to(device)[:, None]
        self._pair_scales = torch.from_numpy(scales.pairs).to(device)[:, None]
        values = max(sum(source.multi_hot), source.num_dense)
        self._samples_at_a_time = max(1, DRAWN_TOGETHER // values)

    def draw(self, split: int, spans: Sequence[tuple[int, int]], to: Samples) -> tuple[Tensor, Tensor]:
        """Fill each batch with the samples of its span; returns, [K, B] each, which are uncertain, and the logits."""
        num_batches, size = to.label.shape
        is_uncertain = torch.empty((num_batches, size), dtype=torch.bool, device=self._device)
        logits = torch.empty_like(to.label)
        for batches, rows in self._chunks(num_batches, size):
            positions = torch.cat([torch.arange(start + rows.start, start + rows.stop, device=self._device)
                                   for start, _ in spans[batches]])
            is_uncertain[batches, rows], logits[batches, rows] = self._draw(split, positions, to, batches, rows)
        return is_uncertain, logits

    def correct(self, split: int, spans: Sequence[tuple[int, int]], to: Samples, is_uncertain: Tensor) -> list[Batch]:
        """Let the host draw the uncertain samples; returns them. Waits for the device."""
        source, size = self._source, to.label.shape[1]
        drawn = []
        for batch, row in is_uncertain.nonzero().tolist():
            position = spans[batch][0] + row
            one = source.rows(split, position, position + 1)
            drawn.append(one)
            to.dense[batch, row] = torch.from_numpy(one.dense[0])
            to.label[batch, row] = float(one.label[0])
            ends = one.lengths[:, 0].cumsum()
            for feature, (most, end) in enumerate(zip(source.multi_hot, ends.tolist(), strict=True)):
                count = int(one.lengths[feature, 0])
                first = self._starts[feature] * size + row * most
                ids = np.full(most, -1, np.int32)
                ids[:count] = one.ids[end - count : end]
                to.ids[batch, first : first + most] = torch.from_numpy(ids)
        return drawn

    def _chunks(self, num_batches: int, size: int) -> Iterator[tuple[slice, slice]]:
        """Batches, and rows of each: all at once where they are few."""
        if num_batches * size <= self._samples_at_a_time:
            yield slice(0, num_batches), slice(0, size)
            return
        for batch in range(num_batches):
            for first in range(0, size, self._samples_at_a_time):
                yield slice(batch, batch + 1), slice(first, min(first + self._samples_at_a_time, size))

    def _draw(
        self, split: int, positions: Tensor, to: Samples, batches: slice, rows: slice
    ) -> tuple[Tensor, Tensor]:
        source, teacher, scales = self._source, self._source.teacher, self._source.scales
        shape = (batches.stop - batches.start, rows.stop - rows.start)
        counters = positions[:, None] * source.num_dense + self._columns
        dense = _bell(_hash(source.key(split, DENSE), counters))
        to.dense[batches, rows] = dense.view(*shape, source.num_dense)
        is_uncertain = torch.zeros(len(positions), dtype=torch.bool, device=self._device)
        effects = torch.empty((len(source.multi_hot), len(positions)), device=self._device)
        latent = torch.empty((2 * teacher.num_pairs, NUM_LATENT, len(positions)), device=self._device)
        for group in self._groups:
            ids = group.draw(split, positions, effects, latent, is_uncertain)
            self._place(group, ids.view(len(group.tables), *shape, -1), to.ids, to.label.shape, batches, rows)

        # In the order of the host, one operation each.
        curved = self._dense_weights * (dense + dense * float(np.float32(CURVATURE)) * dense)
        logits = _sum_in_order(curved.unbind(1), len(positions), self._device) * float(scales.dense)
        logits += float(scales.bias)
        for row in (effects * self._table_scales).unbind():
            logits += row
        pairs = torch.zeros_like(latent[0::2, 0])
        for component in range(NUM_LATENT):
            pairs += latent[0::2, component] * latent[1::2, component]
        for row in (pairs * self._pair_scales).unbind():
            logits += row
        probability = 1 + torch.exp(-logits.clamp(-30, 30).double())
        probability.reciprocal_()
        coin = _uniform(_hash(source.key(split, LABEL), positions))
        to.label[batches, rows] = (coin < probability).view(shape).float()
        is_uncertain |= ~((coin - probability).abs_() > probability * LABEL_TOLERANCE)
        return is_uncertain.view(shape), logits.view(shape)

    def _place(
        self, group: _DeviceGroup, ids: Tensor, to: Tensor, size: tuple[int, ...], batches: slice, rows: slice
    ) -> None:
        """From [G, K, B, multi_hot] into the batches; tables that lie together at once."""
        num_batches, num_rows = size
        for first, count, at in group.runs:
            start = self._starts[at] * num_rows
            stop = start + count * num_rows * group.multi_hot
            lines = to[:, start:stop].view(num_batches, count, num_rows, group.multi_hot)
            lines[batches, :, rows] = ids[first : first + count].transpose(0, 1).to(torch.int32)


class _DeviceGroup:
    """Tables with the same number of ids a sample."""

    def __init__(self, group: Group, source: SyntheticSource, device: torch.device) -> None:
        def on_device(values: NDArray[np.generic]) -> Tensor:
            return torch.from_numpy(np.ascontiguousarray(values)).to(device)

        teacher, tables = source.teacher, group.tables
        self.tables, self.multi_hot = tables, group.multi_hot
        self._is_ragged, self._zipf = source.is_ragged, group.zipf
        self._keys = {which: on_device(keys[tables].view(np.int64)[:, None])
                      for which, keys in source.table_keys.items()}
        self._teacher_keys = on_device(teacher.table_keys[tables].view(np.int64)[:, None])
        self._factor = on_device(group.zipf.factor)
        self._last_row = on_device((group.zipf.rows - 1).astype(np.float64))
        self._places = torch.arange(group.multi_hot, device=device)
        # Quotients need tensors on both sides: by a number, CUDA's kernel multiplies with the inverse.
        self._head = torch.tensor(float(HEAD), dtype=torch.float64, device=device)
        self._num_ids = torch.tensor(float(group.multi_hot), dtype=torch.float64, device=device)
        self._is_mean = group.multi_hot > 1 and bool(teacher.is_mean[tables[0]])
        self._paired = [table for table in tables if table < 2 * teacher.num_pairs]
        self._paired_at = torch.tensor(self._paired, device=device)
        self._tables_at = torch.tensor(tables, device=device)
        self.runs: list[tuple[int, int, int]] = []
        """Tables that follow each other: the first's place in the group, how many, and the first's own number."""
        for _, run in groupby(enumerate(tables), lambda pair: pair[1] - pair[0]):
            members = list(run)
            self.runs.append((members[0][0], len(members), members[0][1]))

    def draw(self, split: int, positions: Tensor, effects: Tensor, latent: Tensor, is_uncertain: Tensor) -> Tensor:
        """Ids [G, n, multi_hot]; sets what they bring to the logits, and adds to what is uncertain."""
        shape = (len(self.tables), len(positions), self.multi_hot)
        counters = (positions[:, None] * self.multi_hot + self._places).view(1, -1)
        x = _uniform(_hash(self._keys[split, IDS], counters)).mul_(self._factor)
        power = self._zipf.power
        x = x.add_(LOW**power).pow_(1 / power) if power else x.exp_().mul_(LOW)
        place = x - LOW
        is_certain = (place - place.round()).abs_() > x.mul_(ID_TOLERANCE)
        is_uncertain |= ~is_certain.view(shape).all(2).all(0)
        place.clamp_(min=0)
        ids = torch.minimum(place, self._last_row, out=place).long()
        del x, place
        bits = _hash(self._teacher_keys, ids).view(shape)
        ids = ids.view(shape)
        weight = torch.div(self._head, ids.double().add_(HEAD))
        is_there = None
        if self._is_ragged:
            drawn = _uniform(_hash(self._keys[split, LENGTHS], positions[None, :]))
            lengths = drawn.mul_(self.multi_hot + 1).long()
            is_there = self._places < lengths[:, :, None]
            weight *= is_there
        if self._is_mean:
            weight /= lengths.clamp_(min=1)[:, :, None].double() if is_there is not None else self._num_ids
        effects[self._tables_at] = _pool(_quarter(bits, 0) * weight).float()
        num_paired = len(self._paired)
        for component in range(NUM_LATENT if num_paired else 0):
            values = _quarter(bits[:num_paired], component + 1).add_(LATENT_MEAN)
            latent[self._paired_at, component] = _pool(values * weight[:num_paired]).float()
        return ids if is_there is None else ids.masked_fill_(~is_there, -1)


class DeviceDrawnSource:
    """A `SyntheticSource` whose held-out samples are drawn on a device."""

    def __init__(self, source: SyntheticSource, device: torch.device) -> None:
        self._source, self._device = source, device
        self._sampler = DeviceSampler(source, device)
        self.num_train_samples, self.num_eval_samples = source.num_train_samples, source.num_eval_samples
        self.notes = source.notes

    def fingerprint(self) -> str:
        return self._source.fingerprint()

    def train_rows(self, epoch: int, start: int, stop: int) -> Batch:
        return self._source.train_rows(epoch, start, stop)

    def eval_rows(self, start: int, stop: int) -> Batch:
        source, n = self._source, stop - start
        num_ids = sum(source.multi_hot)
        to = Samples(torch.empty((1, n, source.num_dense), device=self._device),
                     torch.empty((1, n * num_ids), dtype=torch.int32, device=self._device),
                     torch.empty((1, n), device=self._device))
        is_uncertain, logits = self._sampler.draw(EVAL, [(start, stop)], to)
        corrected = self._sampler.correct(EVAL, [(start, stop)], to, is_uncertain)
        probability = source.teacher.probability_of(logits[0].cpu().numpy())
        for at, one in zip(is_uncertain[0].nonzero()[:, 0].tolist(), corrected, strict=True):
            assert one.best_probability is not None
            probability[at] = one.best_probability[0]
        ids = to.ids[0].cpu().numpy()
        ends = np.cumsum(source.multi_hot) * n
        lengths = np.stack([(of_table.reshape(n, -1) >= 0).sum(1, dtype=np.int32)
                            for of_table in np.split(ids, ends[:-1])])
        batch = Batch(to.dense[0].cpu().numpy(), ids, lengths, to.label[0].cpu().numpy(), best_probability=probability)
        return replace(batch, ids=ids[ids >= 0], is_fixed=False) if source.is_ragged else batch


def _hash(keys: Tensor | int, counters: Tensor) -> Tensor:
    """`hash_counters`: int64 wraps as uint64 does, and a shift that is masked brings in zeros."""
    bits = counters * _signed(STEP) + (_signed(keys) if isinstance(keys, int) else keys)
    for shift, factor in ((30, FIRST), (27, SECOND)):
        bits ^= (bits >> shift).bitwise_and_((1 << (64 - shift)) - 1)
        bits *= _signed(factor)
    bits ^= (bits >> 31).bitwise_and_((1 << 33) - 1)
    return bits


def _signed(number: int) -> int:
    return number - (1 << 64) if number >= 1 << 63 else number


def _uniform(bits: Tensor) -> Tensor:
    return (bits >> 11).bitwise_and_((1 << 53) - 1).double().mul_(2.0**-53)


def _bell(bits: Tensor) -> Tensor:
    halves = 0x0000FFFF0000FFFF
    pair_sums = (bits & halves).add_((bits >> 16).bitwise_and_(halves))
    sums = (pair_sums & 0xFFFFFFFF).add_(pair_sums >> 32)
    return sums.float().sub_(2 * 65535).mul_(float(np.float32(3**0.5 / 65536)))


def _quarter(bits: Tensor, which: int) -> Tensor:
    values = (bits >> (16 * which)).bitwise_and_(0xFFFF).float()
    return values.sub_(65535 / 2).mul_(float(np.float32(12**0.5 / 65536)))


def _pool(values: Tensor) -> Tensor:
    pooled = values[:, :, 0]
    for place in range(1, values.shape[2]):
        pooled = pooled + values[:, :, place]
    return pooled


def _sum_in_order(rows: Sequence[Tensor], size: int, device: torch.device) -> Tensor:
    total = torch.zeros(size, device=device)
    for row in rows:
        total += row
    return total
