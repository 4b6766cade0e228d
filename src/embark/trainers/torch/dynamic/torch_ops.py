"""The operations of a step of the map in plain torch, on any device: shapes follow from the values."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from embark.data import dynamic_ids
from embark.data.dynamic_ids import FREE, SIGNED_STEP, bucket_of, fraction_of, mixed
from embark.spec.model import BUCKET_COUNTERS, BUCKET_SLOTS
from .batch_ids import (
    ADMISSIONS,
    AGE,
    DEFAULTS,
    EVICTIONS,
    HITS,
    LAST_HASH,
    LFU,
    LOOKUPS,
    LRU,
    NEVER,
    NO_ID,
    NO_SLOT,
    Candidates,
    IdLayout,
    IdSlots,
    NewRows,
    RankedIds,
)

if TYPE_CHECKING:
    from .id_map import IdMap


def halve(values: Tensor, ends: Tensor, half_lives: Tensor, step: Tensor, most: int) -> None:
    """Halve the values of tables whose half-life has passed; a table has at most `most`."""
    is_due = (step % half_lives == 0) & (step > 0)
    for at in is_due.nonzero()[:, 0].tolist():
        values[int(ends[at]) : int(ends[at + 1])] >>= 1


def find(ids: IdMap, raw: Tensor, layout: IdLayout, step: Tensor | None) -> IdSlots:
    """Return the slot of each id; with a step, the slots are touched. Ids of 32 bits are none where they are −1."""
    if raw.dtype == torch.int32:
        raw = torch.where(raw == -1, dynamic_ids.NO_ID, raw.long())
    hashes, is_id = mixed(raw, ids.keys[layout.tables]), raw != dynamic_ids.NO_ID
    if ids.world.world_size > 1:
        buckets = bucket_of(hashes, ids.num_buckets[layout.tables])
        is_id = is_id & (buckets >= ids.own_first[layout.tables]) & (buckets < ids.own_end[layout.tables])
    slots = _slots(ids, hashes, layout.tables, is_id)
    is_hit = slots >= 0
    if step is not None:
        _count(ids, LOOKUPS, is_id, layout)
        _count(ids, HITS, is_hit, layout)
        touched = slots[is_hit]
        ids.seen[touched] = step.int()
        if ids.has_counts:
            ids.counts.index_add_(0, touched, (ids.policies[layout.tables[is_hit]] == LFU).int())
    return IdSlots(hashes, torch.where(is_id, slots, NO_ID), is_id & ~is_hit)


def candidates(ids: IdMap, found: IdSlots, layout: IdLayout) -> Candidates:
    """Return the ids without a slot that a step considers."""
    number = found.is_missing.cumsum(0)
    until = torch.cat([number.new_zeros(1), number])[layout.starts]
    nums = torch.minimum(until.diff(), ids.max_new)
    place = number - 1 - until[layout.tables]
    is_taken = found.is_missing & (place < ids.max_new[layout.tables])
    most = min(ids.most_new, layout.longest) if ids.world.world_size > 1 else int(nums.max())  # alike on all ranks
    taken = torch.full((len(nums), max(1, most)), LAST_HASH, device=ids.device)
    places, to = torch.zeros_like(taken), (layout.tables[is_taken], place[is_taken])
    taken[to], places[to] = found.hashes[is_taken], is_taken.nonzero()[:, 0]
    return Candidates(taken, nums, places)


def rank(ids: IdMap, hashes: Tensor, nums: Tensor, step: Tensor) -> RankedIds:
    """Return which candidates are admitted, in which order, and how often each occurs; `hashes` are sorted."""
    width = hashes.shape[1]
    columns = torch.arange(width, device=ids.device)
    is_candidate = columns < nums[:, None]
    is_first = is_candidate & torch.cat([torch.ones_like(is_candidate[:, :1]), hashes[:, 1:] != hashes[:, :-1]], 1)
    # How often each occurs: where the next one begins, less where it begins.
    following = torch.where(is_first, columns, width).flip(1).cummin(1).values.flip(1)
    following = torch.cat([following[:, 1:], torch.full_like(following[:, :1], width)], 1)
    occurrences = (torch.minimum(following, nums[:, None]) - columns).int()
    is_admitted, counters = _admitted(ids, hashes, is_first, occurrences, step)
    buckets = bucket_of(hashes, ids.num_buckets[:, None])
    before = is_admitted.cumsum(1) - is_admitted.int()
    is_other = torch.cat([torch.ones_like(is_first[:, :1]), buckets[:, 1:] != buckets[:, :-1]], 1)
    number = before - torch.where(is_other, before, 0).cummax(1).values
    return RankedIds(is_admitted.view(-1), number.view(-1), occurrences.view(-1), counters)


def _admitted(
    ids: IdMap, hashes: Tensor, is_first: Tensor, occurrences: Tensor, step: Tensor
) -> tuple[Tensor, Tensor | None]:
    is_admitted = is_first
    if ids.has_chances:
        bits = mixed(hashes ^ (step * SIGNED_STEP), ids.chance_keys[:, None])
        is_admitted = is_admitted & (fraction_of(bits) < ids.chances[:, None])
    if not ids.has_counters:
        return is_admitted, None
    own = (mixed(hashes, ids.counter_keys[:, None]) & (BUCKET_COUNTERS - 1)) + ids.first_counter[:, None]
    own += bucket_of(hashes, ids.num_buckets[:, None]) * BUCKET_COUNTERS
    is_counted = is_first & (ids.counts_needed[:, None] > 0)
    own = torch.where(is_counted, own, 0)
    ids.counters.index_add_(0, own.reshape(-1), torch.where(is_counted, occurrences, 0).reshape(-1))
    return is_admitted & (ids.counters[own] >= ids.counts_needed[:, None]), torch.where(
        is_counted, own, -1).reshape(-1)


def choose(ids: IdMap, hashes: Tensor, ranked: RankedIds, step: Tensor) -> Tensor:
    """Return the slot of each admitted id: the `number`-th that its bucket can spare, or −1 if there are no more."""
    found = torch.full_like(hashes.view(-1), -1)
    places = ranked.is_admitted.nonzero()[:, 0]
    if not len(places):
        return found
    tables, number = places // hashes.shape[1], ranked.number[places]
    buckets = bucket_of(hashes.view(-1)[places], ids.num_buckets[tables]) + ids.first_bucket[tables]
    seen = ids.seen.view(-1, BUCKET_SLOTS)[buckets].long()
    counts = ids.counts.view(-1, BUCKET_SLOTS)[buckets].long()
    policies = ids.policies[tables][:, None]
    scores = torch.where(policies == LRU, seen, torch.where(policies == LFU, (counts << 32) + seen, counts))
    scores = torch.where(seen == FREE, -1, torch.where(seen == step, NEVER, scores))
    values, order = scores.sort(dim=1, stable=True)
    within = number[:, None].clamp(max=BUCKET_SLOTS - 1)
    is_there = (number[:, None] < BUCKET_SLOTS) & (values.gather(1, within) < NEVER)
    found[places] = torch.where(is_there, buckets[:, None] * BUCKET_SLOTS + order.gather(1, within), -1)[:, 0]
    return found


def place(ids: IdMap, new: NewRows, ranked: RankedIds, step: Tensor) -> None:
    """Give the slots to their new ids."""
    is_placed = new.slots >= 0
    slots, tables = new.slots[is_placed], new.tables[is_placed]
    ids.statistics[:, ADMISSIONS].index_add_(0, tables, torch.ones_like(tables))
    ids.statistics[:, EVICTIONS].index_add_(0, tables, (ids.seen[slots] != FREE).long())
    ids.hashes[slots] = new.hashes[is_placed]
    ids.seen[slots] = step.int()
    policies = ids.policies[tables]
    born = torch.where(policies == AGE, step, 0).int()
    ids.counts[slots] = torch.where(policies == LFU, ranked.occurrences[is_placed], born)
    if ranked.counters is not None:
        of_placed = ranked.counters[is_placed]
        ids.counters[of_placed[of_placed >= 0]] = 0


def rows(ids: IdMap, found: IdSlots, layout: IdLayout, candidates: Candidates | None) -> Tensor:
    """Return the row of every id: 0 if it has none, −1 where there is no id.

    After a step, which has candidates, ids without a slot are looked up again and counted.
    """
    slots = found.slots
    if candidates is not None:
        slots = torch.where(found.is_missing, _slots(ids, found.hashes, layout.tables, found.is_missing), slots)
        _count(ids, DEFAULTS, slots == NO_SLOT, layout)
    own = torch.where(slots >= 0, slots - ids.first_bucket[layout.tables] * BUCKET_SLOTS + 1, 0)
    return torch.where(slots == NO_ID, -1, own).int()


def _slots(ids: IdMap, hashes: Tensor, tables: Tensor, is_wanted: Tensor) -> Tensor:
    found = torch.full_like(hashes, -1)
    places = is_wanted.nonzero()[:, 0]
    wanted, tables = hashes[places], tables[places]
    buckets = bucket_of(wanted, ids.num_buckets[tables]) + ids.first_bucket[tables]
    is_same = ids.hashes.view(-1, BUCKET_SLOTS)[buckets] == wanted[:, None]
    which = is_same.byte().argmax(1)  # the first: free slots, whose hashes mean nothing, come behind
    slots = buckets * BUCKET_SLOTS + which
    found[places] = torch.where(is_same.any(1) & (ids.seen[slots] != FREE), slots, -1)
    return found


def _count(ids: IdMap, what: int, mask: Tensor, layout: IdLayout) -> None:
    totals = torch.cat([layout.starts.new_zeros(1), mask.cumsum(0)])
    ids.statistics[:, what] += totals[layout.starts].diff()
