"""From events to readings: everything that is listed is found, and nothing else is made up."""

import importlib.util
import math
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from embark.events.events import Event
from embark.events.metrics import METRICS, Latest, readings

FIELDS = st.sampled_from(["step", "loss", "auc", "step_s", "input_s", "own_s", "systems", "gpus", "seconds", "host",
                          "index", "cpu_percent", "power_w", "dense"])
ROOT = Path(__file__).parents[3]
RANKS = {
    "step": 40, "step_s": [0.1, 0.25], "input_s": [0.0, 0.2],
    "systems": [
        {"host": "a", "rank": 0, "cpu_percent": 10.0, "gpus": [{"index": 0, "power_w": 300.0},
                                                              {"index": 1, "power_w": 310.0}]},
        {"host": "b", "rank": 2, "cpu_percent": 20.0, "gpus": []},
    ],
}


def samples_of(event, **options):
    return {(r.metric.name, *(value for _, value in r.labels)): r.value for r in readings(event, **options)}


def test_lists_of_ranks_machines_and_gpus_are_taken_apart():
    assert samples_of(Event("ranks", RANKS)) == {
        ("rank_step_s", "0"): 0.1, ("rank_step_s", "1"): 0.25, ("rank_input_s", "0"): 0.0,
        ("rank_input_s", "1"): 0.2, ("cpu_percent", "a"): 10.0, ("cpu_percent", "b"): 20.0,
        ("gpu_power_w", "a", "0"): 300.0, ("gpu_power_w", "a", "1"): 310.0,
    }


def test_a_rank_that_reported_nothing_has_no_reading():
    event = Event("phases", {"step": 9, "seconds": {"dense": 0.5}, "own_s": [None, 0.4]})
    assert samples_of(event, null_is_nan=True) == {("phase_s", "dense"): 0.5, ("rank_own_s", "1"): 0.4}


def test_what_is_seen_in_training_and_held_out_is_reported_apart():
    assert samples_of(Event("step", {"step": 1, "auc": 0.7}))["auc", "train"] == 0.7
    assert samples_of(Event("eval", {"step": 1, "auc": 0.8}))["auc", "eval"] == 0.8


def test_readings_know_their_time():
    reading = next(iter(readings(Event("step", {"loss": 0.5, "step": 7}, 123.0))))
    assert (reading.metric.name, reading.time_s) == ("loss", 123.0)


def test_what_is_no_number_is_passed_over_and_a_null_may_be_nan():
    event = Event("step", {"step": "x", "loss": None, "auc": "high", "step_s": True})
    assert samples_of(event) == {}
    assert math.isnan(samples_of(event, null_is_nan=True)["loss",])
    assert samples_of(Event("start", {"usd_per_hour": None}), null_is_nan=True) == {}


def test_malformed_events_give_no_readings():
    for values in ({"systems": 3}, {"systems": [None, 4, {"gpus": {"x": 1}}]}, {"step_s": {"0": [1]}}, {}):
        assert list(readings(Event("ranks", values))) == []


JSON = st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
                    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(FIELDS, inner, max_size=4))


@settings(max_examples=80)
@given(kind=st.sampled_from(["step", "eval", "ranks", "phases", "save", "start", "end", "predict"]),
       values=st.dictionaries(FIELDS, JSON, max_size=6), null_is_nan=st.booleans())
def test_whatever_a_file_holds_is_read_or_passed_over(kind, values, null_is_nan):
    for reading in readings(Event(kind, values), null_is_nan=null_is_nan):
        assert isinstance(reading.value, float)
        assert tuple(name for name, _ in reading.labels) == reading.metric.labels


def test_the_newest_stays_and_happenings_are_counted(make_events):
    latest = Latest(make_events("interrupted"))
    by_name = {(r.metric.name, r.labels): r.value for r in latest.readings()}
    assert by_name["last_step", ()] == 1000
    assert by_name["num_interrupts", ()] == 1
    assert by_name["num_errors", ()] == 0
    assert by_name["is_running", ()] == 0
    assert by_name["last_event_s", ()] == make_events()[-1].time_s


def test_a_run_that_continues_elsewhere_forgets_the_machines_it_had():
    latest = Latest([Event("start", {"num_steps": 9}), Event("ranks", RANKS), Event("step", {"step": 40, "loss": 0.5})])
    assert {("host", "b")} <= {label for r in latest.readings() for label in r.labels}
    latest.add(Event("start", {"num_steps": 9}))
    names = {r.metric.name for r in latest.readings()}
    assert "loss" in names
    assert not names & {"cpu_percent", "rank_step_s", "gpu_power_w"}


def test_every_path_leads_from_an_event_to_its_metric():
    """As the path says it, an event is built; the metric must come out of it."""
    for metric in METRICS:
        for path in metric.paths:
            if path[0] in "#@":
                continue
            kind, _, fields = path.partition(".")
            value = 1.5
            for part in reversed(fields.split(".")):
                field, _, label = part.partition("[")
                value = {field: [value if not isinstance(value, dict) else {"host": "h", "index": 0, **value}]
                         if label else value}
            assert metric.name in {r.metric.name for r in readings(Event(kind, value))}, path


def test_the_page_is_made_from_the_list_and_is_current():
    spec = importlib.util.spec_from_file_location("make_metrics", ROOT / "tools" / "make_metrics.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    page = module.page()
    assert (ROOT / "docs" / "reference" / "metrics.md").read_text() == page, "make docs"
    assert all(f"| `{metric.name}` |" in page for metric in METRICS)
