"""A run counts what it costs, and ends before it costs more than it may."""

from __future__ import annotations

import subprocess
import sys
import time
from itertools import count
from pathlib import Path
from uuid import uuid4

import pytest
from limits import HANG_S

from embark.errors import OverBudget, UserError
from embark.events import Event, read_events
from embark.run.budget import PRICE, BudgetGuard, process_age_s, usd_per_hour
from embark.run.signals import stopped_by
from embark.store import RunDir
from embark.trainers import train


@pytest.fixture(autouse=True)
def no_price(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(PRICE, raising=False)


def test_a_purse_is_empty_once_what_is_left_pays_for_no_more_than_a_save(monkeypatch: pytest.MonkeyPatch):
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now)
    purse = BudgetGuard(6.0, 3600.0, lambda: 2.0)
    for later, is_empty in ((0.0, False), (3.9, False), (4.0, True), (100.0, True)):
        monkeypatch.setattr(time, "monotonic", lambda at=later: now + at)
        assert purse.is_spent() == is_empty, later


@pytest.mark.parametrize(("budget", "price"), [(None, 3600.0), (1e-9, None), (None, None)])
def test_without_a_budget_or_a_price_a_purse_is_never_empty(budget: float | None, price: float | None):
    assert not BudgetGuard(budget, price, lambda: 1e9).is_spent()


def test_a_machine_that_costs_nothing_empties_no_purse():
    assert not BudgetGuard(1.0, 0.0, lambda: 1e9).is_spent()


@pytest.mark.parametrize("text", ["free", "nan", "inf", "-1"])
def test_a_price_that_is_none_is_refused(text: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(PRICE, text)
    with pytest.raises(UserError, match=PRICE):
        usd_per_hour()


def test_a_spent_budget_ends_the_process_with_a_code_that_is_not_retried():
    error = stopped_by("budget", "stopped")
    assert isinstance(error, OverBudget)
    assert error.exit_code == 64


def test_the_price_is_the_environments(monkeypatch: pytest.MonkeyPatch):
    assert usd_per_hour() is None
    monkeypatch.setenv(PRICE, "110.08")
    assert usd_per_hour() == 110.08


def test_a_process_knows_how_long_it_has_lived(tmp_path: Path):
    script = "import time; time.sleep(0.5); from embark.run.budget import process_age_s; print(process_age_s())"
    began = time.monotonic()
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=HANG_S)
    duration = time.monotonic() - began
    assert 0.5 <= float(done.stdout) <= duration + 0.05
    assert process_age_s(tmp_path / "none") == 0.0


def test_a_run_without_a_budget_says_what_it_cost(train_tiny, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(PRICE, "3600")
    result = train_tiny("train.num_steps=3")
    (start,), (end,) = result.of("start"), result.of("end")
    assert (start["usd_per_hour"], start["num_machines"], start["is_spot"]) == (3600.0, 1, False)
    assert start["age_s"] < end["spent_usd"] <= process_age_s() + 0.02
    assert "lost" not in end


def test_a_run_whose_money_is_spent_saves_ends_and_is_not_begun_again(train_tiny, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(PRICE, "3600")
    age = process_age_s()
    looks = count()
    with monkeypatch.context() as patched:
        patched.setattr(BudgetGuard, "is_spent", lambda _: next(looks) > 2)
        with pytest.raises(OverBudget, match="stopped by the budget at step") as stopped:
            train_tiny(f"place.budget_usd={age}", "train.num_steps=100000", "train.num_epochs=10000", fresh=False)
    assert stopped.value.exit_code == 64
    with pytest.raises(OverBudget, match=r"has spent \$.* of its budget of"):
        train_tiny(f"place.budget_usd={age}", "train.num_steps=100000", "train.num_epochs=10000", fresh=False)
    result = train_tiny(f"place.budget_usd={age * 2 + 1000}", "train.num_steps=5", "train.num_epochs=10000",
                        fresh=False)
    outcomes = [e["outcome"] for e in result.of("end")]
    assert outcomes == ["budget", "done"]
    assert result.of("end")[-1]["step"] >= result.of("save")[0]["step"] > 0


def test_a_budget_that_was_spent_before_the_first_step_is_told_so(tiny, tmp_path, monkeypatch):
    monkeypatch.setenv(PRICE, "9")
    events = tmp_path / "tiny" / "events.jsonl"
    events.parent.mkdir()
    begun = [Event("begin", {"attempt": attempt, "age_s": 3600.0, "usd_per_hour": 9.0}) for attempt in (1, 2)]
    events.write_text("".join(event.to_json() + "\n" for event in begun))
    with pytest.raises(OverBudget, match=r"has spent \$18.* of its budget of \$5\.00, before its first step"):
        train(tiny("place.budget_usd=5"))


def test_a_budget_of_a_cloud_machine_without_a_price_is_refused(train_tiny):
    with pytest.raises(UserError, match="cannot be enforced"):
        train_tiny("place.budget_usd=5", "place.machine=p5.48xlarge", "train.num_steps=2")


def test_a_budget_on_a_machine_without_a_price_is_reported_to_be_unwatched(train_tiny):
    result = train_tiny("place.budget_usd=5", "train.num_steps=2")
    assert any("place.budget_usd is not enforced" in note["text"] for note in result.of("note"))


@pytest.mark.parametrize("price", ["", "36"])
@pytest.mark.parametrize("place", ["folder", "bucket"])
def test_a_first_start_that_is_refused_stays_only_if_it_cost_money(tiny, tmp_path, monkeypatch, place, price):
    root = str(tmp_path / "runs") if place == "folder" else f"memory://{uuid4().hex}/runs"
    monkeypatch.setenv("EMBARK_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv(PRICE, price)
    for _ in range(2):
        with pytest.raises(UserError, match="no prepared data"):
            train(tiny("data.kind=prepared", f"data.path={tmp_path}/typo", f"store.root={root}"), fresh=True)
    begun = [RunDir(f"{root}/{name}") for name in ("tiny", "tiny-2")]
    assert [run.exists() for run in begun] == [bool(price)] * 2
    assert [run.events.exists() for run in begun] == [bool(price)] * 2


def test_a_refused_start_of_a_run_that_was_there_before_is_recorded(tiny, tmp_path):
    events = tmp_path / "tiny" / "events.jsonl"
    events.parent.mkdir()
    events.write_text(Event("begin", {"attempt": 1}).to_json() + "\n")
    with pytest.raises(UserError, match="no prepared data"):
        train(tiny("data.kind=prepared", f"data.path={tmp_path}/typo"))
    assert [event.kind for event in read_events(events)] == ["begin", "begin", "error"]
