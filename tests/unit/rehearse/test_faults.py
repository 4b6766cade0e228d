"""The words of --preempt, --kill and --lose."""

from __future__ import annotations

import pytest

from embark.errors import UserError
from embark.rehearse.controller import Fault, read_duration, read_faults


@pytest.mark.parametrize(("kind", "word", "expected"), [
    ("preempt", "1@30s", Fault("preempt", 1, 30.0)),
    ("preempt", "0@2m", Fault("preempt", 0, 120.0)),
    ("kill", "1@step20", Fault("kill", 1, None, 20)),
    ("lose", "1@500ms", Fault("lose", 1, 0.5)),
    ("kill", "1@1.5", Fault("kill", 1, 1.5)),
    ("lose", "1@step20", Fault("lose", 1, None, 20)),
])
def test_a_pod_and_a_time(kind, word, expected):
    assert read_faults(kind, [word], 2) == [expected]


@pytest.mark.parametrize(("kind", "word", "words"), [
    ("preempt", "30s", "not POD@TIME"),
    ("preempt", "1@30s+10s", "not a duration"),
    ("lose", "1@soon", "not POD@TIME"),
    ("lose", "1@30x", "not a duration"),
    ("lose", "2@30s", "there is no pod 2"),
])
def test_what_cannot_be_read_is_refused_with_an_example(kind, word, words):
    with pytest.raises(UserError, match=words) as caught:
        read_faults(kind, [word], 2)
    assert caught.value.fix


def test_it_is_due_by_time_or_by_step():
    assert not Fault("kill", 0, 5.0).is_due(4.9, 1000)
    assert Fault("kill", 0, 5.0).is_due(5.0, 0)
    assert not Fault("kill", 0, None, 7).is_due(1000.0, 6)
    assert Fault("kill", 0, None, 7).is_due(0.0, 8)


@pytest.mark.parametrize(("text", "seconds"), [("10m", 600.0), ("90s", 90.0), ("1h", 3600.0), ("45", 45.0)])
def test_a_limit_is_a_time(text, seconds):
    assert read_duration(text, "--limit") == seconds


@pytest.mark.parametrize("text", ["", "soon", "-5s"])
def test_a_limit_that_is_none_is_refused(text):
    with pytest.raises(UserError, match="not a duration"):
        read_duration(text, "--limit")
