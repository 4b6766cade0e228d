"""A model with tables of every kind: one row, few, many, several ids a sample, mean pooling."""

from embark.spec import ModelSpec, Table

MIXED = ModelSpec(
    num_dense=3,
    tables=(
        Table(name="one", rows=1),
        Table(name="many", rows=5_000, multi_hot=9),
        Table(name="large", rows=40_000_000, multi_hot=2, pooling="mean"),
        Table(name="few", rows=3, multi_hot=2),
        Table(name="plain", rows=1_000),
    ),
)
