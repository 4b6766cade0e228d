"""Records become rows in the order of their events, whatever arrives first; labels that come later are joined."""

import json
import random
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from embark.data.stream.event_order import EventOrder, OrderSettings, OrderState
from embark.data.stream.records import Message
from embark.errors import DataError
from embark.features.values import event_time_s

PLAIN = OrderSettings("label", "t", bound_s=5)
JOINED = OrderSettings("label", "t", bound_s=2, key="k", label_window_s=10)


def _messages(rows: list[dict]) -> list[Message]:
    return [Message(number, json.dumps(row).encode()) for number, row in enumerate(rows)]


def _follow(settings: OrderSettings, parts: dict[str, list[Message]], state: OrderState | None = None,
            stop: int | None = None) -> tuple[list[dict], OrderState]:
    """Reads the partitions until the one that is waited for has no more, or for `stop` records."""
    order, rows = EventOrder(settings, state), []
    order.open(list(parts))
    at = {name: sum(m.offset <= order.state.offsets.get(name, -1) for m in part) for name, part in parts.items()}
    while stop is None or stop > 0:
        partition = order.next_partition()
        if at[partition] == len(parts[partition]):
            break
        order.add(partition, parts[partition][at[partition]])
        at[partition] += 1
        rows += order.take(len(order.state.ready))
        stop = None if stop is None else stop - 1
    return rows, order.state


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 2)), min_size=1, max_size=80), st.randoms())
@settings(max_examples=60, deadline=None)
def test_rows_are_in_order_of_events_and_given_out_once_or_counted_late(
    events: list[tuple[int, int]], chance: random.Random
) -> None:
    parts: dict[str, list[Message]] = {}
    for name in ("a", "b", "c"):
        rows = [{"t": at, "n": number} for number, (at, of) in enumerate(events) if "abc"[of] == name]
        parts[name] = _messages(rows)
    rows, state = _follow(PLAIN, parts)
    times = [row["t"] for row in rows]
    assert times == sorted(times)
    assert len({row["n"] for row in rows}) == len(rows)
    assert state.counts["num_rows"] == len(rows) + len(state.early) + state.counts["num_late"]
    # The same from a state that went through JSON, at any record.
    first, between = _follow(PLAIN, parts, stop=chance.randint(0, len(events)))
    again, end = _follow(PLAIN, parts, OrderState.from_json(between.to_json()))
    assert first + again == rows
    assert end.to_json() == state.to_json()


def test_a_row_is_late_only_beyond_the_bound() -> None:
    times = [100, 110, 106, 105, 104, 200]
    rows, state = _follow(PLAIN, {"": _messages([{"t": at} for at in times])})
    assert [row["t"] for row in rows] == [100, 105, 106, 110]
    assert state.counts["num_late"] == 1


def test_a_record_from_the_future_makes_no_other_late() -> None:
    rows = [{"t": 100, "n": 0}, {"t": "2100-01-01T00:00:00Z", "n": 1}, {"t": time.time() + 2 * 86_400, "n": 2},
            *({"t": 100 + n, "n": n} for n in range(3, 20))]
    found, state = _follow(PLAIN, {"a": _messages(rows)})
    assert [row["n"] for row in found] == [0, *range(3, 15)]
    assert state.counts["num_late"] == 0
    assert state.counts["num_unreadable"] == 2


def test_a_state_from_the_future_is_refused() -> None:
    state = _follow(PLAIN, {"a": _messages([{"t": 100}])})[1]
    text = state.to_json().replace('"a": 100.0', f'"a": {time.time() + 2 * 365 * 86_400}')
    with pytest.raises(DataError, match="more than a year ahead"):
        OrderState.from_json(text)


def test_a_state_whose_newest_time_is_no_number_is_refused() -> None:
    state = _follow(PLAIN, {"a": _messages([{"t": 100}])})[1]
    with pytest.raises(DataError, match="is not finite"):
        OrderState.from_json(state.to_json().replace('"a": 100.0', '"a": NaN'))


def test_records_without_a_time_are_never_late() -> None:
    state = _follow(OrderSettings("label"), {"": _messages([{"n": 0}])})[1]
    state.newest_s[""] = 7.0
    rows, state = _follow(OrderSettings("label"), {"": _messages([{"n": 0}, {"n": 1}, {"n": 2}])}, state)
    assert [row["n"] for row in rows] == [1, 2]
    assert state.counts["num_late"] == 0


def test_records_without_a_time_are_trained_as_they_come() -> None:
    rows, _ = _follow(OrderSettings("label"), {"": _messages([{"n": 3}, {"n": 1}, {"n": 2}])})
    assert [row["n"] for row in rows] == [3, 1, 2]


def test_labels_within_the_window_are_joined_and_the_rest_counted() -> None:
    records = [
        {"t": 0, "k": 1}, {"t": 1, "k": 2}, {"t": 2, "k": 3}, {"t": 4, "k": 1, "label": 1},
        {"t": 10, "k": 5, "label": 1}, {"t": 11, "k": 5},  # a label before its row, by the sender's clock
        {"t": 14, "k": 2, "label": 1},  # 13 s behind its row
        {"t": 30, "k": 9, "label": 1}, {"t": 80, "k": 99},
    ]
    rows, state = _follow(JOINED, {"": _messages(records)})
    assert [(row["k"], row["label"]) for row in rows] == [(1, 1), (2, 0), (3, 0), (5, 1)]
    assert state.counts == {"num_rows": 5, "num_labels": 4, "num_labels_joined": 2, "num_without_label": 2,
                            "num_labels_unmatched": 2}


def test_what_is_no_json_object_or_has_no_time_or_key_is_counted() -> None:
    parts = {"": [Message(0, b"{"), Message(1, b"[1]"), Message(2, b'{"t": "soon", "k": 1}'), Message(3, b'{"t": 1}'),
                  Message(4, b'{"t": 1, "k": null}')]}
    rows, state = _follow(JOINED, parts)
    assert (rows, state.counts["num_unreadable"], state.offsets) == ([], 5, {"": 4})


def test_times_are_iso_8601_or_seconds_or_milliseconds() -> None:
    same = ("2024-05-31T18:00:00Z", "2024-05-31T20:00:00+02:00", 1717178400, 1717178400000, "1717178400")
    assert {event_time_s(value) for value in same} == {1717178400.0}
    assert [event_time_s(value) for value in (None, True, "soon", float("nan"), [])] == [None] * 5
