"""Many logs become one: by time, nothing twice, nothing lost."""

from __future__ import annotations

import time

import pytest

from embark.launch.backends.kubernetes.log_follower import PodLogFollower, line_of, time_ns
from embark.launch.backends.kubernetes.reasons import Reason
from embark.launch.backends.kubernetes.status import Pod
from embark.launch.shell import CommandResult, LineStream, Shell


def pod(name: str, phase: str = "Running", has_started: bool = True) -> Pod:
    return Pod(name, f"uid-{name}", 0, "", phase, False, "", Reason(""), has_started, 0)


class Logs:
    """A program that prints, for each pod, the lines from `--since-time` on, as kubectl does."""

    def __init__(self, lines: dict[str, list[str]]) -> None:
        self.lines = lines
        self.asked: list[tuple[str, str]] = []

    def open(self, found: Pod, since: str, follow: bool) -> LineStream:
        self.asked.append((found.name, since))
        kept = [line for line in self.lines[found.name] if line[:19] >= since[:19]]
        return Shell().lines(["printf", "%s\\n", *kept] if kept else ["true"])


def failed(_: Pod, done: CommandResult) -> None:
    raise AssertionError(done.err)


def at(second: int, nanos: int, text: str) -> str:
    return f"2026-11-15T09:00:{second:02d}.{nanos:09d}Z {text}"


def test_lines_of_all_pods_come_in_the_order_of_time():
    logs = Logs({"a": [at(1, 0, "a1"), at(3, 5, "a2")], "b": [at(2, 0, "b1"), at(3, 4, "b2")]})
    found = PodLogFollower(logs.open, failed).now([pod("a"), pod("b"), pod("c", has_started=False)])
    assert [line.text for line in found] == ["a1", "b1", "b2", "a2"]


def test_a_second_reading_goes_on_after_the_last_line_though_kubectl_repeats_its_second():
    logs = Logs({"a": [at(1, 0, "one"), at(2, 7, "two"), at(2, 7, "twin")]})
    following = PodLogFollower(logs.open, failed)
    assert [line.text for line in following.now([pod("a")])] == ["one", "two", "twin"]
    logs.lines["a"] += [at(2, 7, "third of the same time"), at(2, 8, "three")]
    assert [line.text for line in following.now([pod("a")])] == ["third of the same time", "three"]
    assert logs.asked[-1] == ("a", "2026-11-15T09:00:02Z")


def test_following_reads_what_a_pod_wrote_between_two_looks_and_stops_when_all_is_read():
    logs = Logs({"a": [at(1, 0, "one")], "b": [at(2, 0, "other")]})
    looks = iter([[pod("a")], [pod("a", "Succeeded")], [pod("a", "Succeeded"), pod("b", "Succeeded")]])
    last = [pod("a", "Succeeded"), pod("b", "Succeeded")]
    count = 0

    def is_over() -> bool:
        nonlocal count
        count += 1
        return count > 3

    begun_s = time.monotonic()
    found = list(PodLogFollower(logs.open, failed).on(lambda: next(looks, last), is_over, 0.05))
    assert [line.text for line in found] == ["one", "other"]
    assert time.monotonic() - begun_s < 10


def test_a_log_that_cannot_be_read_is_told():
    told: list[str] = []
    following = PodLogFollower(lambda *_: Shell().lines(["sh", "-c", "echo no such pod >&2; exit 1"]),
                          lambda found, done: told.append(f"{found.name}: {done.err.strip()}"))
    assert list(following.now([pod("a")])) == []
    assert told == ["a: no such pod"]


@pytest.mark.parametrize(
    ("stamp", "expected"),
    [("1970-01-01T00:00:01Z", 10**9), ("1970-01-01T00:00:01.5Z", 1_500_000_000),
     ("1970-01-01T00:00:01.000000001Z", 1_000_000_001), ("1970-01-01T02:00:01.25+02:00", 1_250_000_000),
     ("not", 0), ("", 0), ("2026-13-45T00:00:00Z", 0)],
)
def test_times_keep_their_nanoseconds(stamp, expected):
    assert time_ns(stamp) == expected


def test_a_line_is_told_with_its_rank_and_without_one_with_its_pod():
    by_rank = line_of(pod("dlrm-1"), "2026-11-15T10:00:00.000000001Z [rank5]:  train  step 20")
    assert (by_rank.source, by_rank.text) == ("dlrm-1 rank 5", "  train  step 20")
    assert by_rank.time_ns % 1000 == 1
    assert line_of(pod("dlrm-1"), "2026-11-15T10:00:00Z pulling data").source == "dlrm-1"
