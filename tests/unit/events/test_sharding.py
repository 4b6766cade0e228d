"""A plan is told in a few lines, whatever its tables."""

import random

from embark.events.sharding import MAX_LINES, plan_rows, rank_line, ranks_text


def test_equal_tables_are_one_line(make_tables):
    assert plan_rows(make_tables(26)) == [
        ("cat_0 … cat_25", "26 tables × 100,000 rows × 64", "table_wise (fused) on rank 0", "666 MB")
    ]


def test_one_table_and_two_are_named(make_tables):
    assert plan_rows(make_tables(1))[0][:2] == ("cat_0", "100,000 rows × 64")
    assert plan_rows(make_tables(2))[0][0] == "cat_0, cat_1"


def test_tables_spread_over_many_ranks_share_a_line():
    tables = [
        {"table": f"t{i}", "rows": 10 + i % 2, "dim": 8, "sharding": "table_wise", "kernel": "fused", "ranks": [i % 8],
         "bytes": 1000}
        for i in range(40)
    ]  # fmt: skip
    rows = plan_rows(tables)
    assert [row[1] for row in rows] == ["20 tables × 10 rows × 8", "20 tables × 11 rows × 8"]
    assert rows[0][2] == "table_wise (fused) over 4 ranks"


def test_unlike_tables_are_reported_by_their_sharding():
    rng = random.Random(0)
    tables = [
        {"table": f"t{i}", "rows": rng.randint(10, 10**7), "dim": 128, "kernel": "fused",
         "sharding": "row_wise" if i < 3 else "table_wise", "ranks": [0, 1] if i < 3 else [i % 2], "bytes": 10**6}
        for i in range(26)
    ]  # fmt: skip
    rows = plan_rows(tables)
    assert len(rows) == 2
    assert rows[0][0] == "t0 … t2"
    assert rows[0][2] == "row_wise (fused) on ranks 0–1"
    assert rows[1][1].startswith("23 tables × ")
    assert " to " in rows[1][1]
    assert rows[1][3] == "23.0 MB"


def test_never_more_than_a_few_lines_and_no_table_is_lost():
    tables = [
        {"table": f"t{i}", "rows": 10, "dim": 8, "sharding": f"kind_{i}", "kernel": "fused", "ranks": [0], "bytes": i}
        for i in range(9)
    ]
    rows = plan_rows(tables)
    assert len(rows) == MAX_LINES
    assert rows[0][0] == "t8"
    assert rows[-1] == ("and", "5 more tables", "", "10 B")


def test_a_table_name_cannot_write_on_the_screen(make_tables):
    table = {**make_tables(1)[0], "table": "evil\x1b[2J\nname"}
    assert plan_rows([table])[0][0] == "evil[2J name"


def test_no_tables_and_missing_values():
    assert plan_rows([]) == []
    assert plan_rows([{"table": "t"}]) == [("t", "– rows × –", " on no rank", "0 B")]


def test_ranks():
    assert ranks_text([3]) == "rank 3"
    assert ranks_text([0, 1, 2, 3]) == "ranks 0–3"
    assert ranks_text([0, 2, 4, 6, 8]) == "5 ranks"


def test_bytes_per_rank():
    assert rank_line([{"rank": 0, "bytes": 5}]) == ""
    assert rank_line([{"rank": 0, "bytes": 83_200_000}, {"rank": 1, "bytes": 91e6}]) == (
        "83.2 MB to 91.0 MB on each of 2 ranks"
    )
    assert rank_line([{"rank": r, "bytes": 1000} for r in range(8)]) == "1.00 kB on each of 8 ranks"
