"""Many logs become one: by time, nothing twice, nothing lost."""

from __future__ import annotations

import pytest

from embark.launch.backend import LogSource, Reason, read_logs, time_ns
from embark.launch.backends.kubernetes.pods import PodLogPosition, PodStatus
from embark.launch.shell import CommandResult, Shell


def pod(name: str) -> PodStatus:
    return PodStatus(name, 0, "", "Running", False, "", Reason(""), True, 0)


class Logs:
    """Programs that print, for each pod, the lines from `--since-time` on, as kubectl does."""

    def __init__(self, lines: dict[str, list[str]]) -> None:
        self.lines = lines
        self.opened: list[tuple[str, str]] = []
        self.positions = {name: PodLogPosition() for name in lines}

    def source(self, name: str) -> LogSource:
        since = self.positions[name].begin()
        self.opened.append((name, since))
        found = [line for line in self.lines[name] if line[:19] >= since[:19]]
        stream = Shell().lines(["printf", "%s\\n", *found] if found else ["true"])
        return LogSource(stream, lambda text: self.positions[name].parse(pod(name), text), failed)


def failed(done: CommandResult) -> None:
    raise AssertionError(done.err)


def at(second: int, nanos: int, text: str) -> str:
    return f"2026-11-15T09:00:{second:02d}.{nanos:09d}Z {text}"


def test_lines_of_all_pods_come_in_the_order_of_time():
    logs = Logs({"a": [at(1, 0, "a1"), at(3, 5, "a2")], "b": [at(2, 0, "b1"), at(3, 4, "b2")]})
    assert [line.text for line in read_logs([logs.source("a"), logs.source("b")])] == ["a1", "b1", "b2", "a2"]


def test_a_second_reading_skips_lines_that_kubectl_repeats():
    logs = Logs({"a": [at(1, 0, "one"), at(2, 7, "two"), at(2, 7, "twin")]})
    assert [line.text for line in read_logs([logs.source("a")])] == ["one", "two", "twin"]
    logs.lines["a"] += [at(2, 7, "third of the same time"), at(2, 8, "three")]
    assert [line.text for line in read_logs([logs.source("a")])] == ["third of the same time", "three"]
    assert logs.opened[-1] == ("a", "2026-11-15T09:00:02Z")


def test_a_log_that_cannot_be_read_is_reported():
    errors: list[str] = []
    source = LogSource(Shell().lines(["sh", "-c", "echo no such pod >&2; exit 1"]), lambda _: None,
                       lambda done: errors.append(done.err.strip()))
    assert list(read_logs([source])) == []
    assert errors == ["no such pod"]


@pytest.mark.parametrize(
    ("stamp", "expected"),
    [("1970-01-01T00:00:01Z", 10**9), ("1970-01-01T00:00:01.5Z", 1_500_000_000),
     ("1970-01-01T00:00:01.000000001Z", 1_000_000_001), ("1970-01-01T02:00:01.25+02:00", 1_250_000_000),
     ("not", 0), ("", 0), ("2026-13-45T00:00:00Z", 0)],
)
def test_times_keep_their_nanoseconds(stamp, expected):
    assert time_ns(stamp) == expected


def test_a_line_has_its_rank_and_without_one_its_pod():
    by_rank = PodLogPosition().parse(pod("dlrm-1"), "2026-11-15T10:00:00.000000001Z [rank5]:  train  step 20")
    assert (by_rank.source, by_rank.text) == ("dlrm-1 rank 5", "  train  step 20")
    assert by_rank.time_ns % 1000 == 1
    assert PodLogPosition().parse(pod("dlrm-1"), "2026-11-15T10:00:00Z pulling data").source == "dlrm-1"
