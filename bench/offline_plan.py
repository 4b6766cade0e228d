"""How long it takes to place a 10 TB model on 512 GPUs, without one of them: TorchRec's planner and the closed form.

The tables are of mixed sizes, the largest of 2^31 - 1 rows, the rows of the k-th table 1/k of that, about: 2,000 of
them, D = 128. Both planners get the same cluster, and what they answer is compared shard by shard.

    python bench/offline_plan.py [--tables 2000] [--ranks 512] [--optimizer rowwise_adagrad] [--whole]

`--whole` also runs TorchRec's own search, uncut; at the full size that takes hours, so give it few tables and ranks.
"""

from __future__ import annotations

import argparse
import os
import time
from collections import Counter
from collections.abc import Callable

from embark.model.placement import Cluster, Placement, all_table_bytes, shard_bytes
from embark.plan.closed_form import closed_form
from embark.spec import DataSpec, ModelSpec, RunSpec, TrainSpec

MAX_ROWS = 2**31 - 1
EXPONENT = 0.98
GIB = 2**30


def main() -> None:
    options = _options()
    spec = model_of(options.tables, options.optimizer, options.batch_size)
    cluster = Cluster(options.ranks, 8, 80 * GIB, 1800 * GIB)
    print(f"{options.tables:,} tables, {all_table_bytes(spec) / 1e12:.1f} TB with {options.optimizer}'s state, on "
          f"{options.ranks} ranks of 80 GiB; {os.cpu_count()} cores")
    ours = _timed("closed form", closed_form, spec, cluster)
    began = time.perf_counter()
    from embark.model import sharding
    from embark.trainers.torch.sharding import offline_plan

    print(f"{'import of torch and torchrec':28} {time.perf_counter() - began:8.2f} s")
    theirs = _timed("TorchRec's planner", offline_plan, spec, cluster)
    same = len(set(ours.shards) & set(theirs.shards))
    print(f"{same:,} of {len(theirs.shards):,} shards are the same in both")
    if options.whole:
        sharding.MAX_STEPS = sharding.MAX_SHARDS = 10**18
        _timed("TorchRec's, uncut", offline_plan, spec, cluster)


def model_of(num_tables: int, optimizer: str, batch_size: int) -> RunSpec:
    rows = tuple(max(4, int(MAX_ROWS / (i + 1) ** EXPONENT)) for i in range(num_tables))
    return RunSpec.model_validate({
        "name": "large",
        "model": ModelSpec(kind="dcnv2", embedding_dim=128, num_tables=num_tables, rows_per_table=rows),
        "data": DataSpec(num_train_samples=10_000_000),
        "train": TrainSpec.model_validate({"batch_size": batch_size, "optimizer": optimizer}),
    })


def _timed(
    name: str, place: Callable[[RunSpec, Cluster], Placement], spec: RunSpec, cluster: Cluster
) -> Placement:
    began, cpu_began = time.perf_counter(), time.process_time()
    placement = place(spec, cluster)
    elapsed_s, cpu_s = time.perf_counter() - began, time.process_time() - cpu_began
    held: Counter[int] = Counter()
    for shard in placement.shards:
        held[shard.rank] += int(shard_bytes(shard, spec))
    kinds = ", ".join(f"{count:,} {kind}" for kind, count in Counter(placement.shardings.values()).most_common())
    print(f"{name:28} {elapsed_s:8.2f} s  ({cpu_s:.2f} s of a core)  fullest rank {max(held.values()) / GIB:.1f} GiB"
          f"{', some on hosts' if placement.is_on_host else ''}: {kinds}")
    return placement


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tables", type=int, default=2_000)
    parser.add_argument("--ranks", type=int, default=512)
    parser.add_argument("--batch-size", type=int, default=524_288)
    parser.add_argument("--optimizer", default="rowwise_adagrad")
    parser.add_argument("--whole", action="store_true")
    return parser.parse_args()


if __name__ == "__main__":
    main()
