"""A search by trials: nothing is lost or tried twice by a kill, bad trials are pruned, and limits hold.

The trainer counts its steps and its AUC follows from its learning rate, so that a search takes a second.
"""

from __future__ import annotations

import json
import math
import multiprocessing
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from counting_trainer import Instants, Killed, backend_of
from limits import HANG_S
from tiny_runs import TINY

from embark.data.prepare.prepare import prepare_from_spec
from embark.data.prepared.cache import read_manifest
from embark.errors import Diverged, Preempted, UserError
from embark.events import Event
from embark.run.resolve import resolve_run
from embark.run.signals import StopSignals
from embark.spec import load_spec, resolve
from embark.store import RunDir
from embark.tuning.tune import Search, TuneRequest, TuneResult, tune

SETS = ("train.num_steps=8", "store.in_background=false", "store.checkpoint_every=3", "store.checkpoint_at_end=true",
        "store.keep_checkpoints=1", "data.num_eval_samples=50", "watch.every=100")
SEARCH = ("train.learning_rate=0.001..1",)
TWO = TuneRequest(trials=2, search=SEARCH)


def auc_of(spec: Any, steps: int) -> float:
    """Best at a rate of 0.1, and better with every step."""
    return 0.9 - 0.1 * abs(math.log10(spec.train.learning_rate) + 1) - 0.1 / (1 + steps)


class Seen:
    """The events of a search."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def emit(self, event: Event) -> None:
        self.events.append(event)

    def close(self) -> None:
        raise AssertionError("a trial's end is not the search's")


@pytest.fixture
def search(tmp_path, monkeypatch):
    """A function from a request to the result; it may be killed at an instant of the first trial that reaches it."""
    monkeypatch.setattr("embark.run.loop.log_prediction", lambda *_: None)

    def start(
        request: TuneRequest = TWO, *sets: str, instants: Instants | None = None,
        aucs: Any = auc_of, root: str = "runs", view: Any = (), is_due: Any = lambda number: True,
    ) -> TuneResult:
        armed, idle = instants or Instants(), Instants()

        def chosen(spec: Any, *_: Any) -> Any:
            return backend_of(armed if is_due(int(spec.name[-4:])) else idle, aucs).build(spec, *_)

        backend = backend_of(idle, aucs)
        backend.build = chosen
        monkeypatch.setattr("embark.tuning.tune.open_backend", lambda spec: backend)
        if instants is not None:
            monkeypatch.setattr(StopSignals, "look", lambda self: instants.caught)
        return tune(resolve(TINY, [f"store.root={tmp_path / root}", *SETS, *sets]), request, view)

    return start


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """What the trials of a search are that nobody kills."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("embark.run.loop.log_prediction", lambda *_: None)
        patched.setattr("embark.tuning.tune.open_backend", lambda spec: backend_of(Instants(), auc_of))
        root = tmp_path_factory.mktemp("undisturbed")
        return tried(tune(resolve(TINY, [f"store.root={root}", *SETS]), TWO))


def tried(result: TuneResult) -> list[tuple[Any, ...]]:
    return [(one.number, one.state, one.value, one.values) for one in result.trials]


def test_the_first_trial_is_the_specs_own_and_the_best_is_a_spec_file(search, tmp_path):
    seen = Seen()
    result = search(view=[seen])
    assert [one.number for one in result.trials] == [0, 1]
    assert result.trials[0].values == {"train.learning_rate": 0.01}
    assert result.own_value == pytest.approx(0.8 - 0.1 / 9)
    assert result.best_value == max(one.value for one in result.trials if one.value is not None) > result.own_value
    best = load_spec(result.best_spec)
    assert best.train.learning_rate == result.trials[result.best].values["train.learning_rate"]
    assert (best.name, best.train.num_steps, best.train.eval_every) == ("tiny-tuned", 8, 0)
    assert json.loads((tmp_path / "runs/tiny-tune/tune.json").read_text())["best"] == result.best
    over = [event.values for event in seen.events if event.kind == "trial" and event.values["state"] != "unfinished"]
    assert [event["number"] for event in over] == [0, 1]
    assert {path.parts[-3] for path in Path(result.folder).glob("trial-*/checkpoints/step-*")} == {
        f"trial-{result.best:04d}"}


def test_trials_of_other_features_prepare_the_data_again(search, tmp_path):
    rows = "".join(f"{i % 2},{i % 41}.5,{i * i % 97}.25\n" for i in range(400))
    (tmp_path / "rows.csv").write_text("label,x,y\n" + rows)
    values = {key: value for key, value in TINY.items() if key != "model"} | {
        "model": {"embedding_dim": 8, "bottom_mlp": [16], "top_mlp": [16]},
        "data": {"kind": "prepared", "path": str(tmp_path / "data"), "prepare": {"input": str(tmp_path / "rows.csv")}},
        "store": {"root": str(tmp_path / "runs"), "checkpoint_at_end": True},
        "train": {"batch_size": 32, "num_steps": 4}, "features": {"numbers": "standardize"}}
    spec = resolve(values)
    prepare_from_spec(spec)
    widths: dict[int, int] = {}

    def auc_of_width(spec, steps):
        widths[int(spec.name[-4:])] = spec.model.num_dense
        return 0.5 + spec.model.num_dense / 100

    backend = backend_of(Instants(), auc_of_width)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("embark.tuning.tune.open_backend", lambda spec: backend)
        found = tune(spec, TuneRequest(trials=4, search=["features.numbers=standardize,piecewise_linear"]))
    by_trial = {one.number: one.values["features.numbers"] for one in found.trials}
    assert by_trial[0] == "standardize"
    assert "piecewise_linear" in by_trial.values()
    assert {number: 2 if how == "standardize" else 32 for number, how in by_trial.items()} == widths
    best = load_spec(found.best_spec)
    assert best.features.numbers == "piecewise_linear"
    assert len(read_manifest(best.data.path).layout.dense) == 32
    with pytest.raises(UserError, match="cannot be prepared again with other features"):
        tune(resolve(values, ["model.num_dense=2", "name=given"]),
             TuneRequest(trials=2, search=["features.numbers=standardize,piecewise_linear"]))


def test_trials_and_the_best_spec_begin_with_the_defaults_of_train(search, tmp_path):
    rows = "".join(f"{i % 2},{i % 41}.5,{i * i % 97}.25,{'ab'[i % 2]}\n" for i in range(400))
    (tmp_path / "rows.csv").write_text("label,x,y,word\n" + rows)
    spec = resolve({"name": "own", "store": {"root": str(tmp_path / "runs"), "checkpoint_at_end": True}, "data": {
        "kind": "prepared", "path": str(tmp_path / "data"), "prepare": {"input": str(tmp_path / "rows.csv")}}})
    prepare_from_spec(spec)
    models = []

    def auc_of_kind(spec, steps):
        models.append(spec.model)
        return 0.5

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("embark.tuning.tune.open_backend", lambda spec: backend_of(Instants(), auc_of_kind))
        found = tune(spec, TuneRequest(trials=1, search=["features.numbers=auto,standardize"]))
    best, own = load_spec(found.best_spec), resolve_run(spec).spec
    for model in (*models, best.model, own.model):
        assert (model.kind, model.num_members) == ("tabm", 8)
    assert best.train == own.train
    for model in (*models, resolve_run(best).spec.model, own.model):
        assert [(table.name, table.init_range) for table in model.tables] == [("word", 0.05)]


def test_two_towers_are_searched_by_a_ranking_metric(search, tmp_path):
    towers = ("model.kind=two_tower", "model.num_dense=0", "model.two_tower.item=cat_0", "data.num_eval_samples=50")
    by_default = search(TuneRequest(trials=2, search=SEARCH), *towers)
    assert (by_default.metric, by_default.best_value) == ("recall_at_k", max(one.value for one in by_default.trials))
    by_ndcg = search(TuneRequest(trials=1, search=SEARCH, metric="ndcg_at_k"), *towers, root="others")
    assert by_ndcg.own_value == pytest.approx(by_default.own_value / 2)
    with pytest.raises(UserError, match=r"--metric auc is not measured of model\.kind"):
        search(TuneRequest(metric="auc", search=SEARCH), *towers, root="none")


def test_a_search_that_is_done_trains_nothing_and_more_trials_continue_it(search):
    first = search(TuneRequest(trials=1, search=SEARCH))
    assert search(TuneRequest(trials=1, search=SEARCH), aucs=lambda *_: 1 / 0) == first
    assert first.stopped_by == "trials"
    more = search(TuneRequest(trials=2, search=SEARCH))
    assert tried(more)[:1] == tried(first)
    assert len(more.trials) == 2


@pytest.mark.parametrize(("signal", "number", "at", "first_step"), [
    ("", 0, ("step", 1), 0), ("", 1, ("evaluate", 5), 3), ("", 1, ("committed", 8), 8), ("SIGTERM", 1, ("step", 5), 5),
])
def test_a_killed_search_resumes_its_trial_and_repeats_none(
    search, undisturbed, signal, number, at, first_step
):
    with pytest.raises((Killed, Preempted)):
        search(instants=Instants(at, signal), is_due=lambda one: one == number)
    resumed = search(instants=Instants())
    assert tried(resumed) == undisturbed
    starts = [event["first_step"] for event in events_of(resumed, number) if event["event"] == "start"]
    assert starts == [0, first_step]  # from its checkpoint, not from the beginning


def test_a_kill_between_a_trials_end_and_the_word_about_it_loses_neither(search, undisturbed, monkeypatch):
    with killed_before_tell(monkeypatch, 1), pytest.raises(Killed):
        search()
    resumed = search()
    assert tried(resumed) == undisturbed
    assert [event["event"] for event in events_of(resumed, 1)].count("start") == 1


@contextmanager
def killed_before_tell(monkeypatch: pytest.MonkeyPatch, number: int) -> Iterator[None]:
    tell = Search.tell

    def killed(self: Search, trial: Any, *args: Any) -> None:
        if trial.number == number:
            raise Killed
        tell(self, trial, *args)

    with monkeypatch.context() as patched:
        patched.setattr(Search, "tell", killed)
        yield


def test_a_cut_journal_line_and_its_lock_do_not_stop_the_search(search):
    first = search(TuneRequest(trials=1, search=SEARCH))
    journal = Path(first.folder, "optuna.journal")
    with journal.open("ab") as file:
        file.write(b'{"op_code": 5, "worker')
    Path(f"{journal}.lock").symlink_to(journal)
    assert tried(search(TuneRequest(trials=2, search=SEARCH)))[:1] == tried(first)


def in_processes(count: int, work: Any) -> list[Any]:
    """What each of so many processes returns."""
    context = multiprocessing.get_context("fork")
    queue = context.SimpleQueue()
    started = [context.Process(target=lambda: queue.put(work())) for _ in range(count)]
    for one in started:
        one.start()
    for one in started:
        one.join(HANG_S)
        assert one.exitcode == 0
    return [queue.get() for _ in started]


def test_workers_share_the_trials_and_none_is_run_twice(search):
    request = TuneRequest(trials=9, search=SEARCH, workers=3)
    results = in_processes(3, lambda: search(request, aucs=lambda *_: time.sleep(0.02) or 0.5))
    last = search(request)
    assert [one.number for one in last.trials] == list(range(9))
    assert {one.state for one in last.trials} <= {"complete", "pruned"}
    assert last.trials[0].values == {"train.learning_rate": 0.01}
    assert len({one.values["train.learning_rate"] for one in last.trials}) == 9
    assert [[event["event"] for event in events_of(last, number)].count("start") for number in range(9)] == [1] * 9
    assert "trials" in {one.stopped_by for one in results}
    assert json.loads(Path(last.folder, "tune.json").read_text())["stopped_by"] == "trials"


def test_a_worker_leaves_a_trial_to_the_one_that_trains_it(search):
    seen: list[TuneResult] = []

    def aucs(spec: Any, steps: int) -> float:
        if spec.name == "trial-0000" and not seen:
            seen.extend(in_processes(1, lambda: search(TuneRequest(trials=2, search=SEARCH, workers=2))))
        return auc_of(spec, steps)

    result = search(TuneRequest(trials=2, search=SEARCH, workers=2), aucs=aucs)
    assert [one.state for one in seen[0].trials] == ["unfinished", "complete"]
    assert seen[0].stopped_by == ""
    assert [one.state for one in result.trials] == ["complete", "complete"]
    assert result.stopped_by == "trials"


def test_a_trial_of_a_worker_that_died_is_finished_by_another(search):
    request = TuneRequest(trials=2, search=SEARCH, workers=2)
    with pytest.raises(Killed):
        search(request, instants=Instants(("evaluate", 5), ""), is_due=lambda number: number == 0)
    result = search(request)
    assert [one.state for one in result.trials] == ["complete", "complete"]
    starts = [event["first_step"] for event in events_of(result, 0) if event["event"] == "start"]
    assert starts == [0, 3]


def test_the_limit_is_shared_by_the_workers(search, monkeypatch):
    """One of two workers may use half of what is left."""
    deadlines: list[float] = []

    def aucs(spec: Any, steps: int) -> float:
        deadlines.append(signals.deadline_s - time.monotonic())
        return auc_of(spec, steps)

    signals = StopSignals()
    monkeypatch.setattr("embark.tuning.tune.StopSignals", lambda: signals)
    search(TuneRequest(trials=1, minutes=120, search=SEARCH, workers=2), aucs=aucs)
    assert 1800 < deadlines[0] <= 3600


def test_trials_below_the_median_are_pruned_also_after_a_kill(search, monkeypatch):
    aucs = dict(enumerate([0.6, 0.61, 0.62, 0.63, 0.64, 0.5, 0.7]))  # five complete, and then one cannot win

    def start() -> TuneResult:
        return search(TuneRequest(trials=7, search=SEARCH), "store.checkpoint_every=0",
                      aucs=lambda spec, _: aucs[int(spec.name[-4:])])

    with killed_before_tell(monkeypatch, 5), pytest.raises(Killed):
        start()
    result = start()
    assert [one.state for one in result.trials] == ["complete"] * 5 + ["pruned", "complete"]
    pruned, events = result.trials[5], events_of(result, 5)
    assert (pruned.value, result.best) == (None, 6)
    assert RunDir(pruned.run_dir).checkpoints.committed() == []
    assert (events[-1]["step"], events[-1]["outcome"]) == (3, "done")
    assert any("pruned: held-out AUC is worse than the median" in event.get("text", "")
               for event in events)


@pytest.mark.parametrize("name", ["minutes", "usd"])
def test_a_limit_stops_the_trial_under_way_which_a_larger_one_resumes(search, monkeypatch, name):
    """The limit is an hour away, and the clock is set forward by one in the second trial."""
    monkeypatch.setenv("EMBARK_USD_PER_HOUR", "2")

    def slow(spec: Any, steps: int) -> float:
        if spec.name == "trial-0001" and steps == 4:
            now_s = time.monotonic() + 3600
            clock.setattr("embark.run.signals.time.monotonic", lambda: now_s)
        return auc_of(spec, steps)

    with monkeypatch.context() as clock:
        limits, sets = ({"minutes": 60.0}, ()) if name == "minutes" else ({}, ("place.budget_usd=2",))
        result = search(TuneRequest(search=SEARCH, **limits), *sets, aucs=slow)
    assert result.stopped_by == name
    assert [one.state for one in result.trials] == ["complete", "unfinished"]
    assert result.usd == pytest.approx(2 / 3600 * result.seconds)
    resumed = search(TuneRequest(trials=2, search=SEARCH))
    assert [one.state for one in resumed.trials] == ["complete", "complete"]
    assert [event["outcome"] for event in events_of(resumed, 1) if event["event"] == "end"] == ["budget", "done"]


def test_a_trial_that_diverges_has_failed_and_the_search_goes_on(search):
    def diverging(spec: Any, steps: int) -> float:
        if spec.name == "trial-0001":
            raise Diverged("the loss became NaN")
        return auc_of(spec, steps)

    result = search(TuneRequest(trials=3, search=SEARCH), aucs=diverging)
    assert [one.state for one in result.trials] == ["complete", "failed", "complete"]


def test_a_spent_limit_starts_no_trial(search):
    first = search(TuneRequest(trials=1, search=SEARCH))
    again = search(TuneRequest(trials=2, search=SEARCH, minutes=first.seconds / 120))
    assert (again.stopped_by, tried(again)) == ("minutes", tried(first))


def test_the_time_of_a_process_is_counted_once_though_it_trains_many_runs(search):
    began_s = time.time()
    result = search()
    assert sum(one.seconds for one in result.trials[1:]) <= time.time() - began_s


def test_another_search_of_the_same_name_is_refused(search):
    search(TuneRequest(trials=1, search=SEARCH))
    with pytest.raises(UserError, match=r"tiny-tune has the trials of another search: --search changed"):
        search(TuneRequest(trials=2, search=("train.learning_rate=0.001..0.5",)))
    with pytest.raises(UserError, match=r"another search: train\.batch_size, train\.warmup_steps changed"):
        search(TuneRequest(trials=2, search=SEARCH), "train.batch_size=64")


@pytest.mark.parametrize(("request_", "sets", "problem"), [
    (TuneRequest(trials=0), (), "--trials 0 is not a positive number"),
    (TuneRequest(minutes=math.nan), (), "--minutes nan"),
    (TuneRequest(), ("place.budget_usd=3",), "a budget of .3.00 cannot be enforced.*names no machine"),
    (TuneRequest(metric="ndcg_at_k"), (), "--metric ndcg_at_k is not measured of model.kind = \"dlrm\""),
    (TuneRequest(), ("data.num_eval_samples=0",), "on held-out samples, and the data has none"),
    (TuneRequest(), ("store.root=s3://bucket/runs",), "keeps its trials in a local directory"),
])
def test_what_cannot_work_is_refused_before_anything_is_written(search, tmp_path, request_, sets, problem):
    with pytest.raises(UserError, match=problem):
        search(request_, *sets)
    assert not (tmp_path / "runs").exists()


def events_of(result: TuneResult, number: int) -> list[dict[str, Any]]:
    text = Path(result.folder, f"trial-{number:04d}", "events.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]
