"""Preset specs. Each is a function, the same form as a user's own spec in Python."""

from collections.abc import Callable

from embark.spec.data import DataSpec
from embark.spec.model import ModelSpec, Table
from embark.spec.run import RunSpec, StoreSpec
from embark.spec.train import TrainSpec
from embark.spec.watch import WatchSpec

# Rows of Criteo 1TB's 26 tables with ids capped at 40 million, as MLPerf's DLRM-DCNv2 reference has them.
CRITEO_1TB_ROWS = (
    40_000_000, 39_060, 17_295, 7_424, 20_265, 3, 7_122, 1_543, 63, 40_000_000, 3_067_956, 405_282, 10,
    2_209, 11_938, 155, 4, 976, 14, 40_000_000, 40_000_000, 40_000_000, 590_152, 12_973, 108, 36,
)
MLPERF_MULTI_HOT = (3, 2, 1, 2, 6, 1, 1, 1, 1, 7, 3, 8, 1, 6, 9, 5, 1, 1, 1, 12, 100, 27, 10, 3, 1, 1)


def laptop() -> RunSpec:
    """A small model that trains in seconds, to check an installation."""
    return RunSpec(
        name="laptop",
        model=ModelSpec(num_dense=13, embedding_dim=16, bottom_mlp=(64,), top_mlp=(64,), num_tables=8,
                        rows_per_table=1_000),
        data=DataSpec(num_train_samples=400_000, num_eval_samples=65_536),
        train=TrainSpec(batch_size=1_024, learning_rate=0.02, eval_every=200),
        watch=WatchSpec(every=20),
    )


def quickstart() -> RunSpec:
    """DLRM with Criteo's shape: 13 dense features, 26 tables of 100,000 rows, D = 64."""
    return RunSpec(
        name="quickstart",
        model=ModelSpec(num_dense=13, embedding_dim=64, bottom_mlp=(512, 256), top_mlp=(512, 256),
                        num_tables=26, rows_per_table=100_000),
        data=DataSpec(num_train_samples=2_000_000, num_eval_samples=131_072),
        train=TrainSpec(batch_size=2_048, learning_rate=0.01, decay="linear", eval_every=250),
        watch=WatchSpec(every=20),
    )


def criteo_1tb() -> RunSpec:
    """DLRM with Criteo 1TB's tables: 204 million rows, D = 128, 97 GiB in fp32. Wants a large GPU or several."""
    return RunSpec(
        name="criteo-1tb",
        model=ModelSpec(num_dense=13, embedding_dim=128, bottom_mlp=(512, 256),
                        top_mlp=(1024, 1024, 512, 256), num_tables=26, rows_per_table=CRITEO_1TB_ROWS),
        data=DataSpec(num_train_samples=20_000_000, num_eval_samples=1_048_576),
        train=TrainSpec(batch_size=65_536, learning_rate=0.005),
        store=StoreSpec(keep_checkpoints=1),
    )


def mlperf_dcnv2() -> RunSpec:
    """MLPerf's DLRM-DCNv2: the same tables, multi-hot, three cross layers of rank 512."""
    tables = tuple(
        Table(name=f"cat_{i}", rows=rows, multi_hot=ids)
        for i, (rows, ids) in enumerate(zip(CRITEO_1TB_ROWS, MLPERF_MULTI_HOT, strict=True))
    )
    return RunSpec(
        name="mlperf-dcnv2",
        model=ModelSpec(kind="dcnv2", num_dense=13, embedding_dim=128, bottom_mlp=(512, 256),
                        top_mlp=(1024, 1024, 512, 256), num_cross_layers=3, cross_rank=512, tables=tables),
        data=DataSpec(num_train_samples=20_000_000, num_eval_samples=1_048_576),
        train=TrainSpec(batch_size=65_536, learning_rate=0.005, optimizer="adagrad"),
        store=StoreSpec(keep_checkpoints=1),
    )


PRESETS: dict[str, Callable[[], RunSpec]] = {
    "laptop": laptop,
    "quickstart": quickstart,
    "criteo-1tb": criteo_1tb,
    "mlperf-dcnv2": mlperf_dcnv2,
}
