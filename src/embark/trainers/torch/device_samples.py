"""Synthetic samples drawn on the device, bit for bit those of `SyntheticSource`.

Integers, and sums, products and quotients of floats, are the same on every processor; powers and exponentials are not.
They decide an id and a label here only by comparison: where a comparison is closer than their errors, which happens
once in some million samples, the sample counts as uncertain, and the host draws it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from embark.data.loader import Batch
from embark.data.synthetic import DENSE, EVAL, IDS, LABEL, LENGTHS, LOW, TRAIN, SyntheticSource

ID_TOLERANCE = 2.0**-46
"""Relative, of a float64 power, which is an exponential of a logarithm here: the product of the two is at most 22, so
its rounding and the logarithm's come to 2^−47. NumPy's own power errs by up to 4 units in the last place, 2^−50."""
LABEL_TOLERANCE = 2.0**-20
"""Relative, of NumPy's probability: its float32 exponential errs by up to 2.6 units in the last place, the sum and the
quotient by half of one each, 2^−21 together."""


@dataclass(frozen=True, slots=True)
class Samples:
    """Tensors of K batches of B samples, to be filled."""

    dense: Tensor  # [K, B, num_dense]
    ids: Tensor  # [K, …]: feature by feature [B, multi_hot]; −1 behind those of a sample with fewer.
    label: Tensor  # [K, B]


class DeviceSampler:
    """Draws samples on one device. Only `correct` waits for the device."""

    def __init__(self, source: SyntheticSource, device: torch.device) -> None:
        from .sample_kernels import LOGARITHM, NEITHER, POWER

        def on_device(values: object, dtype: torch.dtype) -> Tensor:
            return torch.from_numpy(np.asarray(values)).to(device, dtype)

        self._source, self._device = source, device
        teacher, scales = source.teacher, source.scales
        self._starts = np.cumsum([0, *source.multi_hot]).tolist()
        keys = {split: [source.key(split, DENSE), source.key(split, LABEL)] for split in (TRAIN, EVAL)}
        self._keys = {split: on_device(np.array(of, np.uint64).view(np.int64), torch.int64)
                      for split, of in keys.items()}
        self._table_keys = {
            split: on_device(np.stack([source.table_keys[split, IDS], source.table_keys[split, LENGTHS],
                                       teacher.table_keys], 1).view(np.int64), torch.int64)
            for split in (TRAIN, EVAL)}
        is_averaged = teacher.is_mean & (np.array(source.multi_hot) > 1)
        self._sizes = on_device(np.stack([source.multi_hot, self._starts[:-1], is_averaged], 1), torch.int64)
        spans = np.empty((len(source.multi_hot), 2))
        for group in source.groups:
            spans[group.tables] = np.concatenate([group.zipf.factor, group.zipf.rows - 1], 1)
        self._spans = on_device(spans, torch.float64)
        power = source.groups[0].zipf.power
        self._integral = LOGARITHM if not power else NEITHER if power == 1 else POWER
        self._doubles = on_device([LOW**power, 1 / power if power else 0, ID_TOLERANCE, LABEL_TOLERANCE], torch.float64)
        self._floats = on_device(np.concatenate([[scales.dense, scales.bias], scales.tables, scales.pairs,
                                                 teacher.dense_weights]), torch.float32)

    def draw(self, split: int, spans: Sequence[tuple[int, int]], to: Samples) -> tuple[Tensor, Tensor]:
        """Fill each batch with the samples of its span; returns, [K, B] each, which are uncertain, and the logits."""
        from .sample_kernels import draw_samples

        is_cuda = self._device.type == "cuda"
        is_uncertain = torch.empty(to.label.shape, dtype=torch.int8, device=self._device)
        logits = torch.empty(to.label.shape, device=self._device)
        starts = torch.tensor([start for start, _ in spans], pin_memory=is_cuda)
        draw_samples(
            starts.to(self._device, non_blocking=True), to.dense, to.ids, to.label, is_uncertain, logits,
            keys=self._keys[split], table_keys=self._table_keys[split], sizes=self._sizes, spans=self._spans,
            doubles=self._doubles, floats=self._floats, num_pairs=self._source.teacher.num_pairs,
            integral=self._integral, is_ragged=self._source.is_ragged,
        )
        return is_uncertain.bool(), logits

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
