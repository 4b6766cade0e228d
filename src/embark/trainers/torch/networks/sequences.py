"""The dense layers of DIN, SASRec and HSTU, over sequences of looked-up rows. torch alone."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import embedding, scaled_dot_product_attention, silu

from embark.errors import DataError
from embark.model.work import DIN_UNITS, NUM_TIME_BUCKETS
from embark.spec.model import ModelSpec
from .hstu_attention import hstu_attention, time_bucket, uses_kernels
from .jagged import JaggedLayout, JaggedSequence, move, sample_of_each, take
from .layers import SequenceDropout, bottom_mlp, mlp
from .rank_values import from_all_ranks, gathered

Sequences = Mapping[str, JaggedSequence]
MAX_PLAIN_LENGTH = 512
"""Longest sequence whose attention scores are held in memory on a GPU."""
_NOTHING = -1e4
_NO_ITEM = -2


def sequence_network(model: ModelSpec) -> nn.Module:
    """Make the dense network of a built-in kind that reads sequences."""
    if model.kind == "din":
        return TargetAttention(model)
    return NextItem(model) if model.sequence.is_next_item else SequenceRanker(model)


class TargetAttention(nn.Module):
    """DIN: the history's rows, each weighted by a small network that sees it beside the candidate, and summed."""

    def __init__(self, model: ModelSpec) -> None:
        super().__init__()
        self.roles = model.sequence
        dim = model.feature(self.roles.history).dim or 0
        self.weigh = mlp(4 * dim, (*DIN_UNITS, 1), 0.0, ends_linear=True)
        self.head = Head(model, 3 * dim)

    def forward(
        self, dense: Tensor, pooled: dict[str, Tensor], sequences: Sequences, *, has_spare_rows: bool = False
    ) -> Tensor:
        history, offsets, _ = sequences[self.roles.history]
        candidate = pooled.pop(self.roles.candidate)
        beside = take(candidate, sample_of_each(offsets, len(history)))
        weights = self.weigh(torch.cat([history, beside, history - beside, history * beside], dim=1))
        weighed = (history * weights).float()
        interest = torch.segment_reduce(weighed, "sum", offsets=offsets, initial=0.0)
        return self.head(dense, pooled, [candidate, interest, candidate * interest])


class SequenceRanker(nn.Module):
    """HSTU as a ranker: the candidate follows the history, and its encoding is scored."""

    def __init__(self, model: ModelSpec) -> None:
        super().__init__()
        self.roles = model.sequence
        history = model.feature(self.roles.history)
        self.encoder = Encoder(model, history.multi_hot + 1)
        self.head = Head(model, history.dim or 0)

    def forward(
        self, dense: Tensor, pooled: dict[str, Tensor], sequences: Sequences, *, has_spare_rows: bool = False
    ) -> Tensor:
        history, offsets, _ = sequences[self.roles.history]
        candidate = pooled.pop(self.roles.candidate)
        num_samples, total, device = len(candidate), len(history), history.device
        # Row i of the longer sequences: of the history, or, at the end of a sample, its candidate.
        longer = offsets + torch.arange(num_samples + 1, device=device)
        last_rows = longer[1:].long() - 1
        rows = torch.arange(total + num_samples, device=device)
        samples = torch.searchsorted(longer[1:].contiguous(), rows, right=True)
        is_candidate = rows == torch.cat([last_rows, last_rows.new_full((1,), -1)])[samples]
        order = torch.where(is_candidate, total + samples, rows - samples)
        of_history = torch.arange(total, device=device)
        before = torch.searchsorted(offsets[1:].contiguous(), of_history.to(offsets.dtype), right=True)
        places = torch.cat([of_history + before, last_rows])
        times = None
        if self.roles.times:
            stamps = sequences[self.roles.times].ids
            last = torch.where(offsets.diff() > 0, stamps[(offsets[1:].long() - 1).clamp(min=0)], 0)
            times = torch.cat([stamps, last])[order]
        longer_rows = move(torch.cat([history, candidate.to(history.dtype)]), order, places)
        layout = JaggedLayout(longer, len(rows), self.encoder.max_length * has_spare_rows)
        encoded = self.encoder(longer_rows, layout, times)
        return self.head(dense, pooled, [take(encoded, last_rows)])


class NextItem(nn.Module):
    """SASRec or HSTU that predicts each item of a sequence from those before it.

    Training gives, for each position, the log-odds of the item that follows against the sample's negatives: its log
    loss is the cross-entropy of a softmax over them. Evaluation gives [B, dim + 1]: the vector of all items but the
    last, whose product with an item's row is its score, and the score of the last item. With spare rows, training
    gives a pair: the log-odds of all rows, and which of them are predictions.
    """

    def __init__(self, model: ModelSpec) -> None:
        super().__init__()
        self.roles = model.sequence
        self.encoder = Encoder(model, model.feature(self.roles.history).multi_hot - 1)
        self.log_frequency: Tensor | None = None  # [rows of the table]: subtracted from scores in training.
        self.num_in_batch = 0  # Items of a rank's batch that are its negatives; 0: each sample brings its own.

    def forward(
        self, dense: Tensor, pooled: dict[str, Tensor], sequences: Sequences, *, has_spare_rows: bool = False
    ) -> Tensor | tuple[Tensor, Tensor]:
        history, negatives = sequences[self.roles.history], sequences.get(self.roles.negatives)
        inputs = _Inputs.of(history.offsets, len(history.values), self.encoder.max_length * has_spare_rows)
        times = sequences[self.roles.times].ids[inputs.rows] if self.roles.times else None
        encoded = self.encoder(move(history.values, inputs.rows, inputs.places), inputs.layout, times)
        with torch.autocast(encoded.device.type, enabled=False):  # scores that are rounded to bf16 tie
            if not self.training or negatives is None:
                return _of_last(encoded.float(), inputs, history)
            scores = self._scores(encoded.float(), inputs, history, negatives)
        is_there = inputs.rows >= 0
        return (torch.where(is_there, scores, 0.0), is_there) if has_spare_rows else scores

    def rank(self, sequences: Sequences, candidates: Tensor, users: Tensor, others: Tensor) -> Tensor:
        """Return the log-odds of each of the `candidates` [n, dim] against all of the `others` [m, dim], as in
        training.

        `users` [n] says which history is a candidate's. Where that is empty, all items are alike.
        """
        last = self.vectors(sequences)
        against = (last @ others.T).logsumexp(dim=1)
        return (last[users] * candidates).sum(dim=1) - against[users]

    def vectors(self, sequences: Sequences) -> Tensor:
        """Return the vector of each history, [n, dim]; zeros of an empty one."""
        history, offsets, _ = sequences[self.roles.history]
        last = history.new_zeros(len(offsets) - 1, self.encoder.dim)
        if offsets[-1] > 0:
            times = sequences.get(self.roles.times)
            encoded = self.encoder(history, JaggedLayout(offsets, len(history)), None if times is None else times.ids)
            is_known = offsets.diff() > 0
            last[is_known] = take(encoded, offsets[1:][is_known] - 1)
        return last

    def _scores(
        self, encoded: Tensor, inputs: "_Inputs", history: JaggedSequence, negatives: JaggedSequence
    ) -> Tensor:
        # What a spare row is to predict is no item.
        targets = torch.where(inputs.rows >= 0, history.ids[inputs.next_rows], _NO_ITEM)
        scored = (encoded * move(history.values, inputs.next_rows, inputs.next_places)).sum(dim=1)
        if not len(scored):
            return scored
        if self.num_in_batch:
            against = self._against_batch(encoded, inputs, history)
        else:
            if self.roles.share_negatives:
                ids, others = gathered(negatives.ids), from_all_ranks(negatives.values.float())
                against = encoded @ others.T
            else:
                others, of_sample = self._others(negatives, inputs)
                padding = inputs.layout.padding
                against = padding.unpad([torch.bmm(one, take(others, samples).transpose(1, 2))
                                         for one, (samples, _) in zip(padding.pad(encoded), padding.groups, strict=True)
                                         ])
                ids = of_sample[sample_of_each(inputs.offsets, len(against))]
            is_left_out = ids == targets[:, None]
            if inputs.layout.has_spare_rows:
                is_left_out |= ids < 0
            against = self._corrected(against, ids).masked_fill(is_left_out, -math.inf)
        return self._corrected(scored, targets) - against.logsumexp(dim=1)

    def _corrected(self, scores: Tensor, ids: Tensor) -> Tensor:
        """Subtract the logarithm of how likely each item is to be a negative."""
        if self.log_frequency is None:
            return scores
        # A captured step reports an id outside its table, and goes on.
        return scores - self.log_frequency[ids.clamp(0, len(self.log_frequency) - 1)]

    def _against_batch(self, encoded: Tensor, inputs: "_Inputs", history: JaggedSequence) -> Tensor:
        """Return the scores of each position against items of the batch, evenly spaced, that are not of its own
        history."""
        count = inputs.offsets[-1]
        num = count.clamp(max=self.num_in_batch)
        spaced = torch.arange(self.num_in_batch, device=count.device)
        which = (spaced * count // num.clamp(min=1)).clamp(max=len(inputs.rows) - 1)
        chosen = inputs.next_rows[which].clamp(min=0)
        others, ids = take(history.values, chosen), history.ids[chosen]
        of_rows = (history.ids[:, None] == ids).float()
        is_own = torch.segment_reduce(of_rows, "max", offsets=history.offsets, initial=0.0) > 0
        is_left_out = is_own[sample_of_each(inputs.offsets, len(encoded))] | (spaced >= num)
        against = self._corrected(encoded @ others.float().T, ids)
        # Not −∞: a position against which there is nothing has no loss, and its gradient is 0.
        return against.masked_fill(is_left_out, _NOTHING)

    def _others(self, negatives: JaggedSequence, inputs: "_Inputs") -> tuple[Tensor, Tensor]:
        num_samples = len(negatives.offsets) - 1
        num_each, rest = divmod(len(negatives.ids), num_samples)
        # Who makes batches with spare rows looks at the negatives.
        if rest or not (inputs.layout.has_spare_rows or bool((negatives.offsets.diff() == num_each).all())):
            raise uneven_negatives(self.roles.negatives)
        return negatives.values.view(num_samples, num_each, -1), negatives.ids.view(num_samples, num_each)


def uneven_negatives(name: str) -> DataError:
    return DataError(f"{name}: samples of a batch have different numbers of negatives", "give each sample as many")


def _of_last(encoded: Tensor, inputs: "_Inputs", history: JaggedSequence) -> Tensor:
    last = take(encoded, inputs.offsets[1:].long() - 1)
    target = take(history.values, history.offsets[1:].long() - 1)
    return torch.cat([last, (last * target).sum(dim=1, keepdim=True)], dim=1)


@dataclass(frozen=True, slots=True)
class _Inputs:
    """All rows of each sample but its last, and the row behind each: what it predicts."""

    rows: Tensor  # Rows of the history; -1 of spare ones.
    places: Tensor  # Where each row of the history is among them, or -1.
    next_rows: Tensor
    next_places: Tensor
    layout: JaggedLayout

    @property
    def offsets(self) -> Tensor:
        return self.layout.offsets

    @staticmethod
    def of(offsets: Tensor, total: int, max_length: int) -> "_Inputs":
        """Find them in sequences of `total` rows; `max_length` is that of the inputs if there are spare rows, else
        0."""
        starts, lengths = offsets[:-1].long(), (offsets.diff() - 1).clamp(min=0)
        ends = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
        num = total if max_length else int(ends[-1])
        places = torch.arange(num, device=offsets.device)
        samples = sample_of_each(ends, num)
        rows = torch.where(places < ends[-1], starts[samples] + places - ends[samples], -1)
        next_rows = torch.where(rows < 0, -1, rows + 1)
        samples = sample_of_each(offsets, total)
        within = torch.arange(total, device=offsets.device) - starts[samples]
        to, most = ends[samples] + within, lengths[samples]
        return _Inputs(rows, torch.where(within < most, to, -1), next_rows,
                       torch.where((within > 0) & (within <= most), to - 1, -1), JaggedLayout(ends, num, max_length))


class Head(nn.Module):
    """An MLP over the encoded sequence, the other features and the dense ones."""

    def __init__(self, model: ModelSpec, width: int) -> None:
        super().__init__()
        roles = (model.sequence.history, model.sequence.candidate, model.sequence.times)
        self.bottom = bottom_mlp(model)
        self.others = [t.name for t in model.table_list() if t.name not in roles]
        width += sum(t.dim or 0 for t in model.table_list() if t.name in self.others)
        width += model.embedding_dim if self.bottom is not None else 0
        self.top = mlp(width, (*model.top_mlp, 1), model.dropout, ends_linear=True)

    def forward(self, dense: Tensor, pooled: Mapping[str, Tensor], parts: list[Tensor]) -> Tensor:
        if self.bottom is not None:
            parts = [*parts, self.bottom(dense)]
        logits: Tensor = self.top(torch.cat([*parts, *(pooled[name] for name in self.others)], dim=1))
        return logits.squeeze(1)


class Encoder(nn.Module):
    """Blocks of causal self-attention over sequences; positions count from the newest."""

    def __init__(self, model: ModelSpec, max_length: int) -> None:
        super().__init__()
        self.dim, self.max_length = model.feature(model.sequence.history).dim or 0, max_length
        block = HSTUBlock if model.kind == "hstu" else SASRecBlock
        self.positions = nn.Parameter(torch.empty(max_length, self.dim).normal_(std=0.02))
        has_gaps = bool(model.sequence.times) and model.kind == "sasrec"
        self.gaps = nn.Parameter(torch.zeros(NUM_TIME_BUCKETS, self.dim)) if has_gaps else None
        # HSTU never normalizes what it adds to: rows whose values have grown would outweigh what attention finds.
        self.input_norm = nn.LayerNorm(self.dim) if model.kind == "hstu" and model.is_next_item else nn.Identity()
        self.dropout = SequenceDropout(model.dropout)
        self.blocks = nn.ModuleList(block(model, self.dim, max_length) for _ in range(model.sequence.num_blocks))
        self.norm = nn.LayerNorm(self.dim)

    def forward(self, rows: Tensor, layout: JaggedLayout, times: Tensor | None) -> Tensor:
        offsets = layout.offsets
        samples = sample_of_each(offsets, len(rows))
        from_newest = offsets[1:].long()[samples] - 1 - torch.arange(len(rows), device=rows.device)
        from_newest = from_newest.clamp(min=0)  # of spare rows too
        numbers = samples * self.max_length + from_newest
        batch = Rows(offsets, times, layout, (numbers, self.max_length))
        values = rows * math.sqrt(self.dim) + embedding(from_newest, self.positions)
        if self.gaps is not None and times is not None:
            before = torch.cat([times[:1], times[:-1]])
            is_first = from_newest == offsets.diff().long()[samples] - 1
            values = values + embedding(time_bucket(torch.where(is_first, 0, times - before), NUM_TIME_BUCKETS),
                                        self.gaps)
        values = self.dropout(self.input_norm(values), *batch.numbers)
        for block in self.blocks:
            values = block(values, batch)
        normed: Tensor = self.norm(values)
        return normed


@dataclass(frozen=True, slots=True)
class Rows:
    """Facts about the rows of a batch that all blocks use."""

    offsets: Tensor
    times: Tensor | None
    layout: JaggedLayout
    numbers: tuple[Tensor, int]
    """[total]: of each row in the batch, whatever the lengths of others, and how many a sample has; for dropout."""


def causal_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Compute softmax attention over the past with gradients that repeat from run to run.

    On a GPU those of PyTorch's fused kernels do not; plain products do, but hold all scores in memory, so only shorter
    sequences take them.
    """
    if not q.is_cuda or q.shape[2] > MAX_PLAIN_LENGTH:
        return scaled_dot_product_attention(q, k, v, is_causal=True)
    with sdpa_kernel(SDPBackend.MATH):
        return scaled_dot_product_attention(q, k, v, is_causal=True)


class SASRecBlock(nn.Module):
    """Softmax attention over the past, then a layer for each row."""

    def __init__(self, model: ModelSpec, dim: int, max_length: int) -> None:
        super().__init__()
        self.num_heads = model.sequence.num_heads
        self.attention_norm, self.layer_norm = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv = linear(dim, 3 * dim)
        self.out, self.wide, self.narrow = (linear(dim, dim, std=0.02) for _ in range(3))
        self.drop_attention, self.drop_wide, self.drop_narrow = (SequenceDropout(model.dropout) for _ in range(3))

    def forward(self, values: Tensor, batch: Rows) -> Tensor:
        found = []
        for group in batch.layout.padding.pad(self.qkv(self.attention_norm(values))):
            q, k, v = (one.unflatten(2, (self.num_heads, -1)).transpose(1, 2) for one in group.chunk(3, dim=2))
            # Padding lies behind a sample's last row, where the causal mask hides it.
            found.append(causal_attention(q, k, v).transpose(1, 2).flatten(2))
        values = values + self.drop_attention(self.out(batch.layout.padding.unpad(found)), *batch.numbers)
        wide = self.drop_wide(self.wide(self.layer_norm(values)).relu(), *batch.numbers)
        return values + self.drop_narrow(self.narrow(wide), *batch.numbers)


class HSTUBlock(nn.Module):
    """HSTU: attention by SiLU with relative biases of position and time, gated by each row itself."""

    def __init__(self, model: ModelSpec, dim: int, max_length: int) -> None:
        super().__init__()
        self.num_heads, self.max_length = model.sequence.num_heads, max_length
        # A short sequence's sums over max_length are small: torch's default of 1e-5 would be most of their variance.
        self.norm, self.attended_norm = nn.LayerNorm(dim, eps=1e-6), nn.LayerNorm(dim, eps=1e-6)
        self.uvqk, self.out = linear(dim, 4 * dim), linear(dim, dim)
        self.position_bias = nn.Parameter(torch.empty(2 * max_length - 1).normal_(std=0.02))
        self.time_bias = nn.Parameter(torch.zeros(NUM_TIME_BUCKETS)) if model.sequence.times else None
        self.dropout = SequenceDropout(model.dropout)

    def forward(self, values: Tensor, batch: Rows) -> Tensor:
        if uses_kernels(values, values.shape[1] // self.num_heads):
            from .hstu_block_kernels import fused_block

            return fused_block(self, values, batch.times, batch.layout, self.dropout.drawn(*batch.numbers))
        u, v, q, k = silu(self.uvqk(self.norm(values))).chunk(4, dim=1)
        v, q, k = (one.unflatten(1, (self.num_heads, -1)) for one in (v, q, k))
        attended = hstu_attention(
            q, k, v, batch.offsets, self.max_length, position_bias=self.position_bias, times=batch.times,
            time_bias=self.time_bias, layout=batch.layout)
        gated = u * self.attended_norm(attended.flatten(1))
        return values + self.dropout(self.out(gated), *batch.numbers)


def linear(num_in: int, num_out: int, std: float | None = None) -> nn.Linear:
    """Make a linear layer with Glorot's initial weights, or with normal ones of this deviation: with a small
    one a layer whose output is added to its input changes little at first."""
    layer = nn.Linear(num_in, num_out)
    if std is None:
        nn.init.xavier_uniform_(layer.weight)
    else:
        nn.init.normal_(layer.weight, std=std)
    nn.init.zeros_(layer.bias)
    return layer
