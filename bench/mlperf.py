"""The planner against published figures: MLPerf's DLRM-DCNv2, which HugeCTR ran on 8 to 128 GPUs.

    python bench/mlperf.py

Minutes are those of the results' table; samples are what a submission's rate and minutes multiply to. Batch sizes are
those of the submissions' configurations: 6,912 samples a GPU on 8, 2,112 on 64, 1,056 on 128. As far as is known here,
and its code was not read, HugeCTR spreads tables by
rows and columns over the hosts where that is quicker, and reduces dense gradients while others are computed; Embark's
planner counts the reduction of its captured step in full, though most of it runs beside the update of the tables.
"""

from __future__ import annotations

from dataclasses import dataclass

from embark.catalog import find_machine, load_catalog
from embark.cli.console import Console
from embark.model.placement import Cluster, Placement, Shard
from embark.plan.predict import predict
from embark.plan.prediction import Prediction, Setup
from embark.spec import RunSpec, load_spec


@dataclass(frozen=True, slots=True)
class Published:
    """One result."""

    machine: str
    num_nodes: int
    batch_size: int
    minutes: float
    samples: float


PUBLISHED = (
    Published("p5.48xlarge", 1, 8 * 6_912, 3.84, 3.84 * 60 * 13.8e6),
    Published("p5en.48xlarge", 1, 8 * 6_912, 3.47, 3.47 * 60 * 15.1e6),
    # The same batch as on 128, so the same number of samples.
    Published("p5.48xlarge", 8, 64 * 2_112, 1.35, 0.99 * 60 * 65.9e6),
    Published("p5.48xlarge", 16, 128 * 1_056, 0.99, 0.99 * 60 * 65.9e6),
)


def grid(spec: RunSpec, cluster: Cluster) -> Placement:
    """Every table cut into columns over the hosts and into rows over the ranks of each: work is even, and sums leave a
    host added up. TorchRec calls it a grid; the trainer's planner does not use it, HugeCTR's has its like."""
    hosts = cluster.num_ranks // cluster.ranks_per_host
    shards = []
    for index, table in enumerate(spec.model.table_list()):
        pieces = min(hosts, (table.dim or 0) // 16)
        for piece in range(pieces):
            host = (index * pieces + piece) % hosts
            shards += [Shard(table.name, host * cluster.ranks_per_host + rank,
                             -(-table.rows // cluster.ranks_per_host), (table.dim or 0) // pieces)
                       for rank in range(cluster.ranks_per_host)]
    names = {t.name: "grid_shard" for t in spec.model.table_list()}
    return Placement(cluster.num_ranks, tuple(shards), names, "a grid")


def main() -> None:
    catalog = load_catalog()
    rows = []
    for one in PUBLISHED:
        spec = load_spec("mlperf-dcnv2", [f"train.batch_size={one.batch_size}", "train.comms_dtype=bf16"])
        setup = Setup(spec, find_machine(catalog, one.machine), one.num_nodes)
        own, cut = predict(setup), predict(setup, planner=grid)
        rows.append({"GPUs": f"{setup.num_ranks} × {setup.machine.gpu.name}", "batch": f"{one.batch_size:,}",
                     "published": f"{one.minutes:.2f} min"}
                    | _told("simulated as HugeCTR runs it", min(_reduced_beside(own), _reduced_beside(cut)), one)
                    | _told("as Embark would run it", _step_s(own), one))
    Console().table(rows)


def _step_s(found: Prediction) -> float:
    assert found.step is not None, found.why
    return found.step.total_s


def _reduced_beside(found: Prediction) -> float:
    """Seconds of a step whose dense gradients are reduced while the layers before them compute theirs."""
    assert found.step is not None, found.why
    parts = found.step.parts_s
    meanwhile = parts["dense layers"] + parts["lookup and update"] / 2
    return found.step.total_s - min(parts.get("all-reduce", 0.0), meanwhile)


def _told(name: str, step_s: float, one: Published) -> dict[str, object]:
    minutes = one.samples / one.batch_size * step_s / 60
    return {name: f"{minutes:.2f} min", f"{name}: off by": f"{minutes / one.minutes - 1:+.0%}"}


if __name__ == "__main__":
    main()
