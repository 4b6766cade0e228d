"""Tables whose rows are given to ids as they come: `ids = "dynamic"` of `[[model.tables]]`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from embark.errors import Mistake

if TYPE_CHECKING:
    from embark.spec.model import Table
    from embark.spec.run import RunSpec

BUCKET_SLOTS = 32
"""An id has one bucket of so many rows, by its hash, and competes for a row with the ids of that bucket alone."""
BUCKET_COUNTERS = 128
"""Of `admit = "count"`: ids without a row share so many counters with those of their bucket, by their hash."""
DYNAMIC_FIELDS: dict[str, Any] = {
    "ids": "rows", "capacity": None, "admit": "all", "admit_count": 2, "admit_probability": 0.1, "evict": "lru",
    "half_life": 10_000, "max_new": 4096,
}
"""Fields of a table, with what they are where they are not given."""
KINDS = ("dlrm", "dcnv2")


def num_buckets(capacity: int) -> int:
    """Buckets of a table."""
    return -(-capacity // BUCKET_SLOTS)


def own_buckets(num: int, rank: int, num_ranks: int) -> tuple[int, int]:
    """Of so many buckets, the first of a rank's and the one behind its last: a range of hashes, alike on all ranks."""
    return num * rank // num_ranks, num * (rank + 1) // num_ranks


def id_map_bytes(table: Table, num_ranks: int) -> int:
    """What a dynamic table needs beside its rows on the rank with the largest part of its map: of a row its id, a tag,
    when and how often it was seen; of each counter its number."""
    buckets = -(-num_buckets(table.capacity or 1) // num_ranks)
    return buckets * (BUCKET_SLOTS * (8 + 2 + 4 + 4) + (4 * BUCKET_COUNTERS if table.admit == "count" else 0))


def dynamic_mistakes(spec: RunSpec) -> Iterator[Mistake]:
    """Of dynamic tables, and of their fields in other tables."""
    for index, table in enumerate(spec.model.tables):
        at = f"model.tables.{index}"
        if table.shares:  # it has the fields of that table
            continue
        if not table.is_dynamic:
            for name, default in DYNAMIC_FIELDS.items():
                if getattr(table, name) != default:
                    yield _mistake(f"{at}.{name}", getattr(table, name),
                                   "has no effect on a table whose ids are its rows",
                                   'set ids = "dynamic", or leave it out')
            continue
        if table.capacity is None:
            yield _mistake(f"{at}.capacity", "", "is needed where ids are dynamic", "say how many ids have a row")
        if table.is_sequence or not table.lookup:
            yield _mistake(f"{at}.ids", table.ids, "the rows of a dynamic table are pooled",
                           'set pooling = "sum" or "mean", or ids = "rows"')
        if table.sharding == "data_parallel":
            yield _mistake(f"{at}.sharding", table.sharding, "the rows of a dynamic table are not copied to every rank",
                           "leave it out")
        for field, needs, value in (("admit_count", "admit", "count"),
                                    ("admit_probability", "admit", "probability")):
            if getattr(table, field) != DYNAMIC_FIELDS[field] and getattr(table, needs) != value:
                yield _mistake(f"{at}.{field}", getattr(table, field),
                               f'has no effect while {needs} is "{getattr(table, needs)}"',
                               f'set {needs} = "{value}", or leave it out')
        if table.half_life != DYNAMIC_FIELDS["half_life"] and table.evict != "lfu" and table.admit != "count":
            yield _mistake(f"{at}.half_life", table.half_life, "there are no counts to halve",
                           'set evict = "lfu" or admit = "count", or leave it out')
    if not spec.model.has_dynamic_tables:
        return
    if spec.model.kind not in KINDS and not spec.model.is_own:
        yield _mistake("model.kind", spec.model.kind, "takes no dynamic tables",
                       f'use one of {", ".join(KINDS)}, a model of your own, or ids = "rows"')
    if spec.place.device in ("jax", "tpu"):
        yield _mistake("place.device", spec.place.device, "the JAX trainer has no dynamic tables",
                       'use "cpu" or "cuda", or ids = "rows"')
    if spec.train.warm_start:
        yield _mistake("train.warm_start", spec.train.warm_start, "the rows of a dynamic table are its own ids'",
                       "resume the run itself, or leave train.warm_start out")


def _mistake(field: str, value: object, what: str, fix: str) -> Mistake:
    return Mistake(where="", field=field, value=str(value), what=what, fix=fix)
