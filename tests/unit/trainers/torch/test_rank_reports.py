"""What the ranks know is told, and telling it changes no bit of what is learnt."""

import time

import pytest
import torch

from embark.run.clock import Clock, HostWaits, StepCounters
from embark.run.logger import RunLogger
from embark.run.rank_reports import RankReport, RankReports, first_trouble
from embark.trainers.torch.phases import PHASES, InputWaits

OFF = ("watch.system_every_s=0", "watch.phases_every_s=0")
OFTEN = ("watch.system_every_s=0.001", "watch.phases_every_s=0.001")


def test_losses_are_the_same_bit_for_bit_with_and_without_all_of_it(train_tiny):
    without = train_tiny("train.num_steps=30", *OFF)
    result = train_tiny("train.num_steps=30", *OFTEN)
    assert without.of("ranks") == without.of("phases") == []
    assert len(result.of("ranks")) == 30
    assert len(result.of("phases")) > 1
    assert result.losses() == without.losses()


def test_the_engine_that_is_captured_on_a_gpu_keeps_its_losses_too(train_tiny):
    sets = ("train.num_steps=20", "train.engine=cuda_graph")
    assert train_tiny(*sets, *OFTEN).losses() == train_tiny(*sets, *OFF).losses()


def test_a_run_tells_its_rank_its_machine_and_where_its_steps_go(train_tiny):
    result = train_tiny("train.num_steps=150", "watch.system_every_s=0.05", "watch.phases_every_s=0.05")
    rows = result.of("ranks")
    assert [len(row["step_s"]) for row in rows] == [1] * len(rows)
    assert all(row["step_s"][0] > 0 and row["input_s"][0] >= 0 for row in rows)
    machine = next(machine for row in rows for machine in row["systems"] if "cpu_percent" in machine)
    assert machine["rank"] == 0
    assert 1e6 < machine["resident_bytes"] < machine["host_bytes"]
    assert 0 <= machine["cpu_percent"] <= 100
    look = result.of("phases")[0]
    assert look["step"] > 10
    assert set(look["seconds"]) == set(PHASES)
    assert look["own_s"][0] == pytest.approx(sum(look["seconds"].values()) - look["seconds"]["all_to_all"])


def test_every_step_event_says_how_long_it_waited_for_input(train_tiny):
    result = train_tiny("train.num_steps=3")
    assert all(0 <= e["input_s"] < 10 * e["step_s"] for e in result.of("step"))


def test_they_are_reported_no_more_often_than_asked_and_at_the_end(train_tiny):
    result = train_tiny("train.num_steps=12", "watch.system_every_s=3600", "watch.phases_every_s=0")
    assert [e["step"] for e in result.of("ranks")] == [1, 12]


def test_a_rank_s_own_time_leaves_out_its_wait_for_the_others(tiny, alone):
    seen = Seen()
    reports = RankReports(tiny("watch.system_every_s=0.001"), alone, RunLogger([seen], []), Clock(128), None)
    machine = {"host": "a", "rank": 0}
    first = [row(StepCounters(10, 4.0, 1.0, 0.0), machine), row(StepCounters(10, 4.0, 0.0, 3.0))]
    reports.log(10, first, is_last=False)
    time.sleep(0.002)
    reports.log(20, [row(StepCounters(20, 8.0, 1.0, 0.0)), row(StepCounters(20, 8.0, 2.0, 3.5))], is_last=False)
    first, second = (e.values for e in seen.events if e.kind == "ranks")
    assert first["step_s"] == pytest.approx([0.4, 0.1])
    assert first["input_s"] == pytest.approx([0.1, 0.0])
    assert second["step_s"] == pytest.approx([0.4, 0.35])
    assert second["input_s"] == pytest.approx([0.0, 0.2])
    assert second["systems"] == [machine]


def test_errors_is_that_of_the_lowest_rank_that_has_any():
    none = row(StepCounters(1, 1.0, 0.0, 0.0))
    assert first_trouble([none, none]) is None
    assert first_trouble([none, row(none.counted, trouble=("id", 3, "user"))]) == ("id", 3, "user")


@pytest.mark.parametrize("waits", [HostWaits(), InputWaits(torch.device("cpu"))])
def test_a_clock_counts_the_wait_for_batches_alone(waits):
    clock = Clock(1, waits)
    batches = clock.timed(iter(slow_numbers(3, 0.02)))
    began = time.perf_counter()
    assert [next(batches) for _ in range(3)] == [0, 1, 2]
    waited_s = time.perf_counter() - began
    time.sleep(0.05)  # at work
    for _ in range(3):
        clock.step()
    assert 0.02 <= clock.window()["input_s"] <= waited_s / 3
    assert clock.window()["input_s"] == 0
    assert clock.counters().input_s >= 0.06
    with pytest.raises(StopIteration):
        next(batches)


def test_pauses_are_no_training_and_waits_for_others_are():
    began = time.perf_counter()
    clock = Clock(1)
    with clock.paused():
        time.sleep(0.05)
    with clock.agreeing():
        time.sleep(0.02)
    counted = clock.counters()
    assert 0.02 <= counted.agree_s <= counted.train_s <= time.perf_counter() - began - 0.05


@pytest.mark.gpu
def test_on_a_gpu_only_the_gap_in_its_own_stream_counts_as_waiting():
    device = torch.device("cuda")
    clock = Clock(1, InputWaits(device))
    batches = clock.timed(iter(slow_numbers(2, 0.05)))
    torch.cuda._sleep(int(2e9))  # a second or so of work
    next(batches)
    torch.cuda.synchronize()
    assert clock.counters().input_s < 0.01
    next(batches)
    torch.cuda.synchronize()
    assert clock.counters().input_s == pytest.approx(0.05, rel=0.5)


class Seen:
    def __init__(self):
        self.events = []

    def emit(self, event):
        self.events.append(event)

    def close(self):
        pass


def row(counted, system=None, trouble=None):
    return RankReport(trouble, counted, system, None, False)


def slow_numbers(num, wait_s):
    for number in range(num):
        time.sleep(wait_s)
        yield number
