"""All ranks stop and save together, for whatever reason any of them has."""

import os
import signal
import time
from types import SimpleNamespace

import pytest

from embark.errors import ExitCode, Preempted
from embark.run.checkpointer import FIRST_SAVE_S, CheckpointSchedule
from embark.run.signals import StopSignals, stopped_by
from embark.run.stop import StopCoordinator
from embark.spec import load_spec


class Notices:
    """What a machine says of itself."""

    def __init__(self, notice=None, problem=""):
        self._notice, self.problem = notice, problem

    def notice(self):
        return self._notice


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGUSR1"])
def test_a_signal_stops_and_names_itself(alone, name):
    with StopSignals() as signals:
        together = StopCoordinator(signals, Notices(), alone)
        assert together.decide().stop == ""
        os.kill(os.getpid(), getattr(signal, name))
        assert together.decide().stop == name
        assert together.is_stopping()


def test_a_rank_whose_torchrun_is_gone_stops_and_saves(alone, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    with StopSignals() as signals:
        together = StopCoordinator(signals, Notices(), alone)
        assert together.decide().stop == ""
        monkeypatch.setattr(os, "getppid", lambda: 1)
        assert together.decide().stop == "SIGTERM"


def test_a_shell_that_ends_stops_nothing(alone, monkeypatch):
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    with StopSignals() as signals:
        together = StopCoordinator(signals, Notices(), alone)
        monkeypatch.setattr(os, "getppid", lambda: 1)
        assert together.decide().stop == ""


def test_a_lost_lease_stops_before_anything_that_would_save(alone):
    with StopSignals() as signals:
        os.kill(os.getpid(), signal.SIGTERM)
        lost = SimpleNamespace(is_lost=lambda: True)
        together = StopCoordinator(signals, Notices(notice="preempted"), alone, lease=lost)
        assert together.decide().stop == "lease"
        everyone = SimpleNamespace(is_first=False, sum_of=lambda numbers: [1 for _ in numbers])
        assert StopCoordinator(signals, Notices(), everyone).decide().stop == "lease"


def test_a_second_ctrl_c_leaves_at_once():
    with StopSignals():
        os.kill(os.getpid(), signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


def test_handlers_are_put_back():
    before = signal.getsignal(signal.SIGTERM)
    with StopSignals():
        assert signal.getsignal(signal.SIGTERM) != before
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_notice_stops(alone):
    with StopSignals() as signals:
        assert StopCoordinator(signals, Notices(notice="preempted"), alone).decide().stop == "notice"


def test_a_watch_that_sees_nothing_is_reported_of_once(alone):
    with StopSignals() as signals:
        blind = StopCoordinator(signals, Notices(problem="nobody answers"), alone)
        assert [blind.new_problem(), blind.new_problem()] == ["nobody answers", ""]


def test_how_a_stop_ends_the_process():
    assert stopped_by("SIGINT", "").exit_code == ExitCode.INTERRUPTED == 130
    for name in ("SIGTERM", "SIGUSR1", "notice"):
        assert stopped_by(name, "").exit_code == ExitCode.PREEMPTED == 75
        assert stopped_by(name, "").fix == "run the same command to resume"


def pace(*sets: str, grace_s: float = 30) -> CheckpointSchedule:
    return CheckpointSchedule(load_spec("laptop", sets), 0, grace_s)


def test_a_fixed_pace_saves_at_its_multiples():
    fixed = pace("store.checkpoint_every=100")
    assert [step for step in range(1, 301) if fixed.is_due(step)] == [100, 200, 300]
    assert fixed.saved(100, pause_s=1, cost_s=2, step_s=0.1) is None
    assert not pace("store.checkpoint_every=0").is_due(100)


def test_auto_measures_one_save_and_then_keeps_to_what_it_costs(monkeypatch):
    auto = pace("store.hours_between_failures=1")
    assert not auto.is_due(1)
    began = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: began + FIRST_SAVE_S + 1)
    assert auto.is_due(2)
    auto.begun(2, step_s=0.1)
    assert not any(auto.is_due(step) for step in range(3, 200))  # one at a time: its cost is not known yet
    assert auto.is_due(202)  # it failed: try again
    choice = auto.saved(2, pause_s=0.5, cost_s=2, step_s=0.1)
    # Young: sqrt(2 × 0.5 s × 3600 s) = 60 s, that is 600 steps of 0.1 s.
    assert choice.every_steps == pytest.approx(600, rel=0.02)
    assert not auto.is_due(2 + choice.every_steps - 1)
    assert auto.is_due(2 + choice.every_steps)


def test_a_grace_too_short_for_a_save_is_reported_and_saves_come_closer():
    roomy, tight = pace(grace_s=120), pace(grace_s=15)
    costs = {"pause_s": 8.0, "cost_s": 40.0, "step_s": 0.1}
    assert tight.saved(2, **costs).every_steps < roomy.saved(2, **costs).every_steps
    assert "15.0 s" in tight.saved(2, **costs).why
    assert tight.is_grace_too_short(40)
    assert not roomy.is_grace_too_short(40)


def test_a_closed_terminal_stops_the_run_unless_nohup_ignores_it():
    before = signal.getsignal(signal.SIGHUP)
    try:
        for handler, caught in ((signal.SIG_DFL, "SIGHUP"), (signal.SIG_IGN, "")):
            signal.signal(signal.SIGHUP, handler)
            with StopSignals() as signals:
                os.kill(os.getpid(), signal.SIGHUP)
                assert signals.caught == caught
            assert signal.getsignal(signal.SIGHUP) == handler
    finally:
        signal.signal(signal.SIGHUP, before)
    assert isinstance(stopped_by("SIGHUP", "stopped"), Preempted)


def test_ctrl_c_leaves_at_once_while_the_library_loads():
    with StopSignals(is_loading=True) as signals:
        os.kill(os.getpid(), signal.SIGTERM)
        assert signals.caught == "SIGTERM"
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    with StopSignals(is_loading=True) as signals, pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)
    assert signals.caught == ""
