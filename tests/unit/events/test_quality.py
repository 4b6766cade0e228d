"""What a run's figures say about the model is named, with the next thing to try, and a sound run has no finding."""

import json
from typing import Any

import pytest
from served_traffic import TROUBLES

from embark.diagnose.report import diagnose
from embark.diagnose.source import DiagnosedFile
from embark.events.drift import NUM_SCORE_BINS
from embark.events.events import Event
from embark.events.quality import Quality, quality_rules
from embark.report.context import RunContext, diagnose_run
from embark.report.record import Record
from embark.report.report import report
from embark.report.run_files import RunFiles

GOOD = {"auc": 0.75, "log_loss": 0.45, "normalized_entropy": 0.85, "calibration": 1.02, "num_samples": 20000}


def evaluated(step: int, **values: Any) -> Event:
    return Event("eval", {**GOOD, "step": step, **values})


def trained(*losses: float, auc: float = 0.76) -> list[Event]:
    return [Event("start", {"first_step": 0, "num_steps": 100 * len(losses)}),
            *(Event("step", {"step": 100 * (i + 1), "loss": loss, "auc": auc, "num_samples": 5000})
              for i, loss in enumerate(losses))]


def scored(kind: str, *bins: int) -> list[Event]:
    """A run of a model of this kind, whose held-out logits are in these bins of half a unit; the 17th begins at 0."""
    start, *rest = trained(0.6, 0.55)
    counts = [1000 * (number in bins) for number in range(NUM_SCORE_BINS)]
    return [Event("start", {**start.values, "model_kind": kind}), *rest,
            evaluated(200, calibration=2.5, score_counts=counts)]


SOUND = [*trained(0.5, 0.46, 0.44), evaluated(100, log_loss=0.48), evaluated(200, log_loss=0.46), evaluated(300)]
CASES = {
    "overfitting": [*trained(0.5, 0.4, 0.3), evaluated(100, log_loss=0.46), evaluated(300, log_loss=0.52)],
    "worse-than-the-mean": [*trained(0.5, 0.49), evaluated(200, normalized_entropy=1.015)],
    "label-leaks": [*trained(0.5, 0.1), evaluated(200, auc=0.9991)],
    "learned-nothing": [*trained(0.69, 0.69, auc=0.5), evaluated(200, auc=0.503)],
    "miscalibrated": [*trained(0.5, 0.45), evaluated(200, calibration=1.14)],
    "logits-like-probabilities": scored("my_model:MyModel", 17, 18),
    "rate-does-nothing": [*trained(0.6931, 0.6932), evaluated(100, log_loss=0.69312), evaluated(200, log_loss=0.69312)],
    "columns-not-used": [*SOUND, Event("note", {"level": "warning", "text": "columns not used: title, url"})],
    "ids-clipped": [*SOUND, Event("note", {"text": "column 'c': ids outside 0 to 9: 2, the first is 12 in row 3 of the "
                                                   "data; clipped"})],
    **TROUBLES,
}


def names(events: list[Event]) -> list[str]:
    quality = Quality()
    for event in events:
        quality.add(event)
    return [one.name for one in quality.findings()]


def test_every_rule_has_a_case():
    assert set(CASES) == set(quality_rules())


@pytest.mark.parametrize("name", CASES)
def test_each_is_found_alone(name):
    assert names(CASES[name]) == [name]


def test_a_sound_run_has_no_finding():
    assert names(SOUND) == []
    assert names(trained(0.5)) == []
    assert names([]) == []


def test_a_leak_is_found_in_few_samples_and_names_the_column():
    events = [*trained(0.5, 0.1), evaluated(200, auc=0.9991, num_samples=787)]
    assert names(events) == ["label-leaks"]
    note = "secret (AUC 1.0000) alone predicts the label of held-out rows"
    record = Record([*events, Event("note", {"level": "warning", "text": note})])
    assert [one.cause for one in record.quality.findings()] == [f"The label probably leaks: {note}."]


def test_a_gap_between_training_and_held_out_figures_needs_one_evaluation():
    found = names([*trained(0.5, 0.08, auc=0.987), evaluated(200, auc=0.6632, log_loss=0.9, normalized_entropy=1.93)])
    assert found == ["overfitting", "worse-than-the-mean"]


@pytest.mark.parametrize("events", [
    [*trained(0.5, 0.49), evaluated(200, auc=0.51, num_samples=100, calibration=1.3)],  # Chance, in so few samples.
    [*trained(0.5, 0.49), evaluated(200, best_auc=0.9995, auc=0.9991)],  # Synthetic data that allows as much.
    [*trained(0.4, 0.42, 0.45), evaluated(100, log_loss=0.44), evaluated(300, log_loss=0.46)],  # Both losses rise.
    [*trained(0.5), Event("note", {"text": "columns not used: a"}), *SOUND],  # A run that was started anew.
])
def test_what_may_be_chance_or_sound_is_not_named(events):
    assert names(events) == []


@pytest.mark.parametrize("events", [scored("dlrm", 17, 18), scored("my_model:MyModel", 16, 17),
                                    scored("my_model:MyModel", 18, 19)])
def test_other_logits_and_built_in_models_are_only_miscalibrated(events):
    assert names(events) == ["miscalibrated"]


def test_a_run_that_stopped_early_is_not_advised_to(shown):
    events = CASES["overfitting"]
    for has_stopped in (True, False):
        end = Event("end", {"outcome": "done", "early_stopping": {"has_stopped": has_stopped}})
        assert names([*events, end]) == ([] if has_stopped else ["overfitting"])
        assert ("overfits" in shown([*events, end])) is not has_stopped


def test_of_a_followed_run_the_next_thing_to_try_is_to_follow(tmp_path):
    events = [Event("start", {"first_step": 0, "stream": "nats: clicks"}), *CASES["learned-nothing"][1:]]
    (tmp_path / "events.jsonl").write_text("".join(f"{event.to_json()}\n" for event in events))
    (found,) = diagnose_run(RunFiles(str(tmp_path)))
    assert "embark follow SPEC --fresh" in found.command
    assert "embark train" not in found.command
    context = RunContext("run", "runs/run", Record(events), 0.0, spec={"stream": {"source": "nats"}})
    assert context.commands[0].startswith("embark follow runs/run/spec.toml")


@pytest.mark.parametrize("name", CASES)
def test_the_end_of_the_run_diagnose_the_report_and_the_page_name_the_same(name, shown, tmp_path):
    events = CASES[name]
    finding = Record(events).quality.findings()[0]
    assert f"look at   {finding.cause} Next: {finding.fix}." in shown([*events, Event("end", {"outcome": "done"})])
    (tmp_path / "events.jsonl").write_text("".join(f"{event.to_json()}\n" for event in events))
    on_page = diagnose_run(RunFiles(str(tmp_path)))
    assert [(one.cause, one.fix) for one in on_page] == [(finding.cause, finding.fix)]
    data = "".join(f"{event.to_json()}\n" for event in events).encode()
    found = diagnose([DiagnosedFile("events.jsonl", "events", data=data)]).diagnoses
    assert [(one.name, one.kind) for one in found] == [(name, "quality")]
    assert found[0].fix
    assert found[0].command
    record = Record(events)
    text = json.dumps(str(report(RunContext("run", "runs/run", record, 0.0))))
    assert record.quality.findings()[0].cause.split(":")[0] in text
