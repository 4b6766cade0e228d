"""Where a step's time goes: every second of a step is told once, under the name of what took it."""

import subprocess
import sys
import time

import pytest
import torch

from embark.data import open_source
from embark.run.clock import Clock
from embark.trainers.torch import phases
from embark.trainers.torch.engines.pipeline import BatchRange
from embark.trainers.torch.phases import PHASES, STEP_NAME, InputWaits, Operation, Profiler, device_phases, host_phases
from embark.trainers.torch.trainer import TorchTrainer
from embark.trainers.torch.world import join


def ran(*rows):
    return [Operation(name, round(start_s * 1e9), round(end_s * 1e9)) for name, start_s, end_s in rows]


def test_an_operation_belongs_to_its_caller_and_counts_once():
    seconds = host_phases(ran(
        (STEP_NAME, 0, 100),
        ("## copy_batch_to_gpu 4 ##", 1, 10),
        ("embark::input", 2, 8),
        ("## start_sparse_data_dist 4 ##", 10, 14),
        ("## forward 3 ##", 20, 60),
        ("aten::linear", 21, 30),
        ("[lookup]_[tables]_[table_wise]", 30, 45),
        ("aten::index_select", 31, 44),
        ("aten::gather", 50, 55),
        ("## backward 3 ##", 60, 90),
        ("autograd::engine::evaluate_function: _LookupAndUpdateBackward", 70, 80),
        ("c10d::allreduce_", 80, 85),
        ("## optimizer 3 ##", 90, 97),
    ))
    assert seconds == pytest.approx({
        "input": 6, "copy": 3, "lookup": 25, "all_to_all": 9, "dense": 40, "optimizer": 7, "other": 10,
    })
    assert sum(seconds.values()) == pytest.approx(100)


def test_what_runs_between_steps_is_not_counted():
    seconds = host_phases(ran((STEP_NAME, 0, 2), ("aten::mm", 0.5, 1), ("aten::mm", 5, 9), (STEP_NAME, 10, 11)))
    assert seconds["dense"] == pytest.approx(0.5)
    assert sum(seconds.values()) == pytest.approx(3)


def test_an_operation_that_outlives_its_step_is_cut_at_its_end():
    assert sum(host_phases(ran((STEP_NAME, 0, 2), ("aten::mm", 1, 9))).values()) == pytest.approx(2)


def test_on_a_device_what_is_hidden_behind_work_costs_nothing():
    seconds = device_phases(ran(
        ("Memcpy HtoD (Pinned -> Device)", 0, 10),
        ("sm90_xmma_gemm_bf16", 2, 6),
        ("ncclDevKernel_SendRecv", 5, 9),
        ("_look_up", 10, 12),
        ("_update_short", 12, 13),
        ("_optimizer_step", 13, 14),
        ("void somebodys_kernel", 14, 15),
    ), wall_s=20, input_s=2)
    assert seconds == pytest.approx({
        "input": 2, "copy": 3, "lookup": 3, "all_to_all": 3, "dense": 4, "optimizer": 1, "other": 4,
    })


@pytest.fixture
def looked(tiny, built):
    """Takes steps and looks at some of them."""

    def look(*sets, wait_s=0.0):
        spec, ready, looks = tiny(*sets), built(*sets), Profiler(torch.device("cpu"))
        clock = Clock(spec.train.batch_size, InputWaits(torch.device("cpu")))
        with ready.engine.feed(open_source(spec), BatchRange(spec.train.batch_size, 0, 1, 0, 9)) as fed:
            batches = clock.timed(slow(fed, wait_s))
            for step in range(6):
                if step == 2:
                    looks.begin(clock.counters().input_s)
                with looks.step():
                    ready.engine.step(batches, step)
                looks.stepped(clock.counters().input_s)
        return looks

    return look


def slow(batches, wait_s):
    for batch in batches:
        time.sleep(wait_s)
        yield batch


def test_a_look_at_a_real_step_finds_what_it_is_made_of(looked):
    looks = looked("model.rows_per_table=5000", "model.embedding_dim=64", "train.batch_size=2048",
                   "data.num_train_samples=65536")
    seconds = looks.take()
    assert looks.problem == ""
    assert set(seconds) == set(PHASES)
    for phase in ("lookup", "dense", "optimizer"):
        assert seconds[phase] > 0, seconds
    assert seconds["other"] < 0.5 * sum(seconds.values())
    assert looks.take() is None


def test_the_engine_that_runs_operation_by_operation_is_reported_apart_too(looked):
    seconds = looked("train.engine=cuda_graph").take()
    assert seconds["lookup"] > 0
    assert seconds["dense"] > 0


def test_slow_input_is_found_as_such(looked):
    seconds = looked(wait_s=0.1).take()
    assert seconds["input"] > 0.09


def test_a_profiler_that_fails_ends_the_looking_and_not_the_steps(looked, monkeypatch):
    def broken(*_args, **_more):
        raise RuntimeError("CUPTI is\nin use")

    monkeypatch.setattr(torch.autograd.profiler, "profile", broken)
    looks = looked()
    assert looks.problem == "RuntimeError: CUPTI is in use"
    assert looks.take() is None
    monkeypatch.undo()
    looks.begin(0.0)
    assert not looks.is_active


def test_a_result_that_cannot_be_read_ends_the_looking(looked, monkeypatch):
    monkeypatch.setattr(phases, "host_phases", lambda _: 1 / 0)
    assert looked().problem.startswith("ZeroDivisionError")


LOOKS = """
import torch
from embark.trainers.torch.phases import Profiler

looks = Profiler(torch.device("cpu"))
looks.begin(0.0)
while looks.is_active:
    with looks.step():
        torch.ones(8, 8) @ torch.ones(8, 8)
    looks.stepped(0.0)
assert looks.take(), looks.problem
"""


def test_nothing_is_written_to_the_terminal_by_a_look():
    """In a process of its own: the profiler's library asks only once whether it may write."""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", LOOKS], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.gpu
@pytest.mark.parametrize("engine", ["cuda_graph", "pipeline"])
def test_on_a_gpu_all_kernels_of_a_step_are_reported(tiny, engine):
    sets = ("place.device=cuda", f"train.engine={engine}", "train.batch_size=2048", "data.num_train_samples=65536")
    spec = tiny(*sets)
    with join(spec.place) as world:
        looks, source = Profiler(world.device), open_source(spec)
        ready, clock = TorchTrainer(spec, world, 100, source), Clock(spec.train.batch_size, InputWaits(world.device))
        with ready.engine.feed(source, BatchRange(spec.train.batch_size, 0, 1, 0, 12)) as fed:
            batches = clock.timed(fed)
            for step in range(9):
                if step == 5:
                    looks.wait_for_device()
                    looks.begin(clock.counters().input_s)
                    began = time.perf_counter()
                ready.engine.step(batches, step)
                if looks.is_at_last_step:
                    looks.wait_for_device()
                    wall_s = time.perf_counter() - began
                looks.stepped(clock.counters().input_s)
        seconds = looks.take()
    assert looks.problem == ""
    assert seconds["lookup"] > 0
    assert seconds["dense"] > 0
    assert sum(seconds.values()) == pytest.approx(wall_s / phases.NUM_STEPS, rel=0.2)
