"""A run's end is told once, in the record and by the error, whichever library trained."""

from __future__ import annotations

from contextlib import ExitStack
from types import SimpleNamespace

import pytest
from tiny_runs import TINY

from embark.data import open_source
from embark.diagnose.scan import rule_named
from embark.errors import EmbarkError, Fault, OverBudget, Preempted, UserError
from embark.events.events import Event
from embark.run.early_stopping import EarlyStopping
from embark.run.logger import RunLogger, recorded_errors
from embark.run.loop import TrainingLoop
from embark.run.open_run import RunOpener, last_finished_step, life_events, replay_finished
from embark.run.resolve import ResolvedRun
from embark.run.signals import StopSignals
from embark.run.stop import Decision
from embark.run.training_data import TrainingData
from embark.spec import resolve
from embark.store import RunDir


class Seen:
    """Keeps what it is told."""

    def __init__(self):
        self.events = []
        self.is_closed = False

    def emit(self, event):
        self.events.append((event.kind, event.values))

    def close(self):
        self.is_closed = True


class Saver:
    """Knows whether a last save was asked for."""

    def __init__(self):
        self.finished = []

    def finish(self, step, evaluated, *, wants_last):
        self.finished.append((step, evaluated, wants_last))

    def add_evaluation(self, step, evaluated):
        self.finished.append((step, evaluated))


@pytest.fixture
def seen() -> Seen:
    return Seen()


@pytest.fixture
def end(tiny, alone, tmp_path, seen):
    """A function from a decision and a step to how a run of ten steps ends; beside it, what its saver was asked."""
    saver = Saver()

    def run(decision: Decision, step: int, *sets: str, evaluation=None, source=None):
        data = TrainingData(source or SimpleNamespace(num_eval_samples=int(evaluation is not None)))
        loop = TrainingLoop(
            run=ResolvedRun(tiny(*sets), (), data, steps_per_epoch=5, num_steps=10, identity={}), world=alone,
            run_dir=RunDir(str(tmp_path / "tiny")), logger=RunLogger([seen], []), checkpoints=saver,
            trainer=SimpleNamespace(peak_bytes=lambda: 77, input_waits=lambda: None),
            stop=SimpleNamespace(is_stopping=lambda: False), step=step, decision=decision, evaluated={"auc": 0.7},
            early_stopping=EarlyStopping(tiny(*sets).train, source, alone, None),
        )
        loop.evaluation = evaluation
        loop.save_and_evaluate()
        return loop.end()

    return run, saver


def test_the_end_is_logged_and_returned_with_the_last_evaluation(end, seen, tmp_path):
    run, saver = end
    values = run(Decision(), 10)
    ((kind, run_events),) = seen.events
    assert kind == "end"
    assert (run_events["outcome"], run_events["step"], run_events["peak_bytes"]) == ("done", 10, 77)
    assert run_events["run_dir"] == str(tmp_path / "tiny")
    assert values == {"auc": 0.7, **run_events}
    assert saver.finished == [(10, {"auc": 0.7}, False)]


def test_a_column_that_gives_the_label_away_is_named_before_the_end(end, seen, tmp_path):
    (tmp_path / "rows.csv").write_text("secret,label\n" + "".join(f"{i % 2},{i % 2}\n" for i in range(400)))
    sets = ("model.num_dense=0", "model.tables=[{name='secret', rows=2}]", "data.kind=columns",
            f"data.path={tmp_path / 'rows.csv'}")
    spec, run = resolve({}, sets), end[0]
    run(Decision(), 10, *sets, evaluation=SimpleNamespace(run=lambda *_: {"auc": 1.0}), source=open_source(spec))
    assert [kind for kind, _ in seen.events] == ["eval", "note", "end"]
    assert seen.events[1][1]["text"] == "secret (AUC 1.0000) alone predicts the label of held-out rows"


def test_the_last_save_comes_before_the_last_evaluation_and_learns_of_it(end):
    run, saver = end

    def measure(trainer, step, is_stopping):
        assert saver.finished == [(10, {}, True)]  # with the metrics of an earlier step it could pass for the best
        return {"auc": 0.8}

    assert run(Decision(), 10, "store.checkpoint_at_end=true", evaluation=SimpleNamespace(run=measure))["auc"] == 0.8
    assert saver.finished[1:] == [(10, {"step": 10, "auc": 0.8})]


def test_a_fault_in_the_last_evaluation_costs_no_work(end):
    run, saver = end

    def fail(trainer, step, is_stopping):
        raise Fault("the disk with the held-out samples is gone")

    with pytest.raises(Fault, match="held-out"):
        run(Decision(), 10, "store.checkpoint_at_end=true", evaluation=SimpleNamespace(run=fail))
    assert saver.finished == [(10, {}, True)]


@pytest.mark.parametrize(
    ("decision", "sets", "expected"),
    [(Decision(), ("store.checkpoint_at_end=true",), True), (Decision(is_save_due=True), (), True),
     (Decision(), (), False)],
)
def test_the_last_step_is_saved_where_the_spec_asks_for_it(end, decision, sets, expected):
    run, saver = end
    run(decision, 10, *sets)
    assert saver.finished[0][2] is expected


@pytest.mark.parametrize(
    ("stop", "error", "outcome", "why"),
    [("SIGTERM", Preempted, "interrupted", "SIGTERM"), ("notice", Preempted, "interrupted", "notice"),
     ("budget", OverBudget, "budget", "the budget")],
)
def test_a_run_that_was_stopped_saves_tells_why_and_raises_it(end, seen, tmp_path, stop, error, outcome, why):
    run, saver = end
    with pytest.raises(error, match=f"stopped by {why} at step 4 of 10; saved in {tmp_path / 'tiny'}") as caught:
        run(Decision(stop), 4)
    is_known = any(pattern.regex.search(str(caught.value)) for pattern in rule_named("spot-taken-back").patterns)
    assert is_known is (error is Preempted), "embark diagnose knows the message"
    assert [kind for kind, _ in seen.events] == ["interrupt", "end"]
    assert seen.events[0][1] == {"step": 4, "signal": stop}
    assert seen.events[1][1]["outcome"] == outcome
    assert saver.finished == [(4, {"auc": 0.7}, True)]


def test_a_run_stopped_before_its_first_step_starts_over(end, seen):
    with pytest.raises(Preempted) as caught:
        end[0](Decision("SIGTERM"), 0)
    assert caught.value.fix == "run the same command to start over: there is no checkpoint yet"
    assert seen.events[1][1]["step_s"] is None


def test_a_run_that_was_finished_says_so_to_whoever_watches(seen):
    values = replay_finished(RunDir("runs/tiny"), 10, resolve(TINY), [seen])
    assert values == {"outcome": "done", "step": 10, "run_dir": "runs/tiny"}
    (kind, run_events), *_ = seen.events
    assert kind == "note"
    assert "runs/tiny is finished: 10 steps" in run_events["text"]
    assert seen.is_closed


def test_a_finished_run_returns_and_shows_what_it_did_when_it_ended(seen, tmp_path):
    end = {"outcome": "done", "step": 10, "run_dir": "where/it/was", "samples_per_s": 5.0}
    events = [Event("eval", {"step": 5, "auc": 0.6}), Event("eval", {"step": 10, "auc": 0.7}), Event("end", end)]
    (tmp_path / "events.jsonl").write_text("".join(event.to_json() + "\n" for event in events))
    values = replay_finished(RunDir(str(tmp_path)), 10, resolve(TINY), [seen])
    assert values == {**end, "auc": 0.7, "run_dir": str(tmp_path)}
    assert [(kind, shown.get("step")) for kind, shown in seen.events] == [("note", None), ("eval", 10), ("end", 10)]


@pytest.mark.parametrize(
    ("raised", "known", "expected", "recorded"),
    [
        (Fault("the store is away"), None, Fault, ["the store is away"]),
        (Preempted("stopped"), None, Preempted, []),
        (RuntimeError("gloo: closed"), Fault("a rank was lost"), Fault, ["a rank was lost"]),
        (RuntimeError("no idea"), None, RuntimeError, ["no idea"]),
    ],
)
def test_what_ends_a_run_is_in_its_record_and_raised_in_our_words(raised, known, expected, recorded):
    files, view = Seen(), Seen()

    def explain(error: RuntimeError) -> EmbarkError | None:
        assert error is raised
        return known

    with pytest.raises(expected) as caught, recorded_errors(RunLogger([view], [files]), explain):
        raise raised
    assert caught.value is (known or raised)
    assert caught.value.__cause__ is (raised if known else None)
    assert [values["text"] for kind, values in files.events if kind == "error"] == recorded
    assert view.events == []


@pytest.mark.parametrize("error", [MemoryError(), MemoryError("Unable to allocate 9 TiB")])
def test_too_little_host_memory_is_an_error_in_words(seen, error):
    logger = RunLogger([], [seen])
    with pytest.raises(UserError, match="out of host memory"), recorded_errors(logger, lambda _: None):
        raise error


@pytest.mark.parametrize(("line", "step"), [
    ('{"event": "end", "time_s": 1, "outcome": "done"}', 0),
    ('{"event": "end", "time_s": 1, "outcome": "done", "step": "ten"}', 0),
    ('{"event": "end", "time_s": 1, "outcome": "done", "step": {"a": 1}}', 0),
    ('{"event": "end", "time_s": 1, "outcome": "done", "step": 7}\n' + "[" * 100_000, 7),
    ('{"event": "end", "time_s": 1, "outcome": ["done"], "step": 7}', 0),
])
def test_a_damaged_record_of_the_end_is_no_end(tmp_path, line, step):
    (tmp_path / "events.jsonl").write_text(line + "\n")
    assert last_finished_step(life_events(RunDir(str(tmp_path)))) == step


@pytest.mark.parametrize("name", ["spec.toml", "events.jsonl", "plan.txt"])
def test_a_folder_where_a_run_writes_a_file_is_named(tiny, alone, tmp_path, name):
    (tmp_path / "run" / name).mkdir(parents=True)
    spec = resolve(TINY, ["name=run", f"store.root={tmp_path}"])
    with ExitStack() as at_end, pytest.raises(UserError, match=f"{name} is a directory"):
        RunOpener(StopSignals(), (), at_end).begin(spec, fresh=False)
