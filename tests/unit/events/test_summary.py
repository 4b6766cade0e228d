"""The sentence at the end is true."""

import math
from io import StringIO

import pytest
from rich.console import Console

from embark.events import summary
from embark.events.events import Event
from embark.events.summary import History


def read(events):
    history = History()
    for event in events:
        history.add(event)
    return history


def test_how_far_from_chance_to_the_best(make_events):
    assert summary.outcome_sentence(read(make_events(auc=0.7912))) == (
        "Held-out AUC 0.7912: 97 % of the way from chance (0.5) to the best any model could reach on these samples "
        "(0.8003)."
    )


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"auc": 0.8002}, "Held-out AUC 0.8002: 99 % of the way"),
        ({"auc": 0.8005}, "Held-out AUC 0.8005: the best any model could reach on these samples (0.8003)."),
        ({"auc": 0.75, "best_auc": None}, "Held-out AUC 0.7500, on 100,000 samples."),
        ({"auc": 0.48}, "Held-out AUC 0.4800: no better than chance (0.5)."),
        *(({"auc": auc, "log_loss": 0.45},
           "Held-out log loss 0.4500; AUC is undefined on these samples: it needs both labels.")
          for auc in (None, math.nan)),
        ({"auc": 0.75, "best_auc": None, "step": 900}, "Held-out AUC 0.7500 at step 900, on 100,000 samples."),
    ],
)
def test_the_result_in_one_sentence(make_events, values, sentence):
    assert summary.outcome_sentence(read(make_events(**values))).startswith(sentence)


@pytest.mark.parametrize(("early", "sentence"), [
    ({"metric": "auc", "path": "runs/demo/checkpoints/step-000000600"}, "Held-out AUC 0.7800 at step 600, on"),
    ({"metric": "auc", "path": ""}, "Held-out AUC 0.7500, on"),  # it could not be saved
    ({"metric": "log_loss", "path": "runs/demo/checkpoints/step-000000600"}, "Held-out AUC 0.7500, on"),
])
def test_the_result_is_that_of_the_checkpoint_that_early_stopping_kept(make_events, early, sentence):
    history = read(make_events(auc=0.75, best_auc=None))
    history.end = {**history.end, "early_stopping": {**early, "best": 0.78, "best_step": 600}}
    assert summary.outcome_sentence(history).startswith(sentence)


def test_the_closing_figures_are_of_the_checkpoint_that_was_kept(make_events):
    ranks = {"recall_at_k": 0.4, "ndcg_at_k": 0.3, "hit_at_k": 0.4, "k": 10, "num_users": 50}
    for metric, more, sentence, shown in (
        ("log_loss", {}, "Held-out AUC 0.7700 at step 600, on", "0.7700"),
        ("ndcg_at_k", ranks, "Held-out Recall@10 0.4000", "0.4000"),
    ):
        events = make_events(auc=0.75, best_auc=None)
        for step, changes in ((600, {"auc": 0.77, **more}), (1000, {"auc": 0.75, **dict.fromkeys(more, 0.2)})):
            evaluated = next(event for event in reversed(events) if event.kind == "eval")
            events.insert(-1, Event("eval", {**evaluated.values, "step": step, **changes}, evaluated.time_s))
        history = read(events)
        assert not summary.outcome_sentence(history).startswith(sentence)
        history.end = {**history.end, "early_stopping": {
            "metric": metric, "best": 0.3, "best_step": 600, "path": "runs/demo/checkpoints/step-000000600"}}
        assert summary.outcome_sentence(history).startswith(sentence)
        console = Console(width=120, file=StringIO())
        console.print(summary.metrics(history, 120))
        assert shown in console.file.getvalue()


def test_a_lost_loss_is_the_result_whatever_was_held_out(make_events):
    events = make_events()
    events.insert(-1, Event("step", {"step": 1000, "loss": math.nan}, 2e9))
    assert summary.outcome_sentence(read(events)).startswith("The loss became NaN")


def test_without_held_out_samples(make_events):
    events = [event for event in make_events() if event.kind != "eval"]
    assert summary.outcome_sentence(read(events)) == (
        "Trained to step 1,000: training loss 0.4516; no samples were held out.")


def test_an_interrupted_run_says_from_where_it_resumes(make_events):
    assert summary.outcome_sentence(read(make_events("interrupted"))) == (
        "Interrupted by SIGTERM at step 1,000 of 1,000. Run the same command to resume from step 1,000."
    )
    unsaved = [event for event in make_events("failed") if event.kind != "save"]
    assert summary.outcome_sentence(read(unsaved)) == (
        "Failed at step 1,000 of 1,000. No checkpoint yet: the same command starts over.")


@pytest.mark.parametrize(("run_dir", "same"), [("runs/try", "without --fresh"),
                                               ("runs/try-2", "with --set name=try-2 in place of --fresh")])
def test_a_fresh_run_says_how_it_is_resumed(make_events, run_dir, same):
    events = make_events("interrupted")
    start = {**events[0].values, "name": "try", "run_dir": run_dir, "is_fresh": True}
    assert f"Run the same command {same} to resume from step 1,000." in summary.outcome_sentence(
        read([Event("start", start, events[0].time_s), *events[1:]]))


def test_the_work_counts_this_process_steps_only(make_events):
    events = make_events()
    start = Event("start", {**events[0].values, "first_step": 400}, events[0].time_s)
    assert summary.work(read([start, *events[1:]])) == "600 steps · 4.10 M samples in 5 min 12 s · 41.2 k samples/s"


def test_a_run_that_did_no_step_has_no_work_and_no_step_time_to_show():
    history = History()
    for kind, values in (("start", {"num_steps": 10, "first_step": 0}), ("predict", {"step_s": 0.1, "peak_bytes": 5}),
                         ("end", {"outcome": "interrupted", "step": 0, "step_s": None, "peak_bytes": 5})):
        history.add(Event(kind, values))
    assert (summary.work(history), summary.predicted_and_actual(history)) == ("", "")


def test_curves_are_pointed_to_only_where_they_are(make_events, tmp_path):
    events = make_events()
    there = tmp_path / "my runs"
    events[-1] = Event("end", {**events[-1].values, "run_dir": str(there)})
    assert dict(summary.paths(read(events))) == {"run": str(there)}
    (there / "tensorboard").mkdir(parents=True)
    assert dict(summary.paths(read(events)))["curves"] == f"tensorboard --logdir '{there}/tensorboard'"


def test_the_time_left_follows_the_pace_and_not_the_evaluations(make_events):
    history = read([Event("start", {"num_steps": 1000}, 0.0)])
    assert history.seconds_left is None
    for second in range(1, 11):
        history.add(Event("progress", {"step": second * 10}, float(second)))
    assert history.seconds_left == pytest.approx(90)
    history.add(Event("eval", {"step": 100, "auc": 0.7}, 500.0))
    for second in range(1, 11):
        history.add(Event("progress", {"step": 100 + second * 10}, 500.0 + second))
    assert history.seconds_left == pytest.approx(80)


def test_a_run_whose_budget_is_spent_says_how_to_resume(make_events):
    assert summary.outcome_sentence(read(make_events("budget"))) == (
        "Budget spent: stopped at step 1,000 of 1,000. Raise place.budget_usd to resume from step 1,000."
    )


def test_what_was_lost_and_what_it_took_are_one_line(make_events):
    events = make_events()
    assert summary.costs(read(events)) == ""
    *others, end = events
    lost = "preempted twice; 41 steps (12.0 s) repeated, 1 min 35 s down: $0.87"
    with_lost = Event("end", {**end.values, "lost": lost, "spent_usd": 1234.5}, end.time_s)
    assert summary.costs(read([*others, with_lost])) == f"{lost} · $1,234 in all"
    paid = Event("end", {**end.values, "spent_usd": 0.5}, end.time_s)
    assert summary.costs(read([*others, paid])) == "$0.50 in all"
