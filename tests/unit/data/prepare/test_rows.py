"""Rows that were left out are counted by reason and reported by their line in the file."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from embark.data.prepare.inputs import InputFile
from embark.data.prepare.rows import BadRows, SegmentCounts, reason_of, should_give_up
from embark.errors import DataError
from embark.features.rows import MAX_QUOTED, BadRow, RawRows


def piece(num_rows: int, bad: list[BadRow], times: int = 1) -> RawRows:
    """`times` as many bad rows are counted as are quoted."""
    reasons = Counter(reason_of(one.why) for one in bad * times)
    return RawRows(np.arange(num_rows), np.zeros(num_rows, np.float32), np.zeros((num_rows, 0), np.float32), (), (), (),
                   bad=tuple(bad), reasons=reasons, num_lines=num_rows + reasons.total())


def record(*pieces: RawRows) -> dict:
    tally = SegmentCounts()
    for one in pieces:
        tally.add(one)
    return tally.to_json()


def test_lines_of_later_segments_are_those_of_the_file():
    files = [InputFile("a", 1), InputFile("b", 1)]
    first = record(piece(9, [BadRow(4, "x")]))
    second = record(piece(3, []), piece(5, [BadRow(3, "y is 'q', wrong"), BadRow(6, "y is 'r', wrong")]))
    bad = BadRows.collect(files, [[first, second], [first]])
    assert bad.examples == (("a", 5, "x"), ("a", 14, "y is 'q', wrong"), ("a", 17, "y is 'r', wrong"), ("b", 5, "x"))
    assert bad.files == {"a": {"y is …, wrong": 2, "x": 1}, "b": {"x": 1}}
    assert (bad.num_rows, bad.num_bad) == (26, 4)


def test_only_the_first_are_quoted_and_all_are_counted():
    many = record(piece(10, [BadRow(i, "x") for i in range(MAX_QUOTED)], times=25))
    bad = BadRows.collect([InputFile("a", 1)], [[many, many]])
    assert len(bad.examples) == MAX_QUOTED
    assert bad.num_bad == 1000
    assert sum(bad.files["a"].values()) == 1000


def test_a_larger_share_than_allowed_is_refused_with_examples_and_the_fix():
    bad = BadRows.collect([InputFile("a.tsv", 1)], [[record(piece(98, [BadRow(7, "no"), BadRow(9, "not that")]))]])
    bad.check(0.02)
    with pytest.raises(DataError, match=r"(?s)2 of 100 rows .*2\.00%.*a\.tsv, line 8: no") as caught:
        bad.check(0.019)
    assert "max_bad_share = 0.02" in caught.value.fix


def test_values_do_not_make_reasons_differ():
    assert reason_of("cat_0 is 'it\\'s', bad") == reason_of('cat_0 is "q", bad') == "cat_0 is …, bad"


def test_reading_is_given_up_only_when_most_rows_are_bad():
    assert should_give_up(5_000, 10_001, 0.001)
    assert not should_give_up(20_000, 10_001, 0.001)
    assert not should_give_up(0, 100, 0.001)
    assert not should_give_up(5_000, 10_001, 0.9)
