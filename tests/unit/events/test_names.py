"""Each measured quantity is named once."""

from embark.events.metrics import METRICS, find, metric

NOT_MEASURED = {
    "step", "epoch", "num_samples", "path", "bytes", "signal", "outcome", "run_dir", "level", "text",
}  # fmt: skip


def test_every_quantity_that_events_measure_is_listed(make_events):
    used = {
        name
        for outcome in ("done", "interrupted", "failed")
        for event in make_events(outcome)
        if event.kind in ("progress", "step", "eval", "save", "end")
        for name in event.values
    }
    assert {"loss", "auc", "best_auc", "save_s", "train_s"} <= used
    assert [name for name in sorted(used - NOT_MEASURED) if find(name) is None] == []


def test_no_name_is_listed_twice_and_all_say_what_they_mean():
    names = [m.name for m in METRICS]
    assert len(names) == len(set(names))
    assert all(m.meaning and m.label for m in METRICS)


def test_a_name_in_seconds_has_the_unit_of_seconds():
    for m in METRICS:
        if m.name.endswith("_per_s"):
            assert m.unit.endswith("/s")
        elif m.name.endswith("_s"):
            assert m.unit == "s"


def test_lookup():
    assert metric("auc").better == "up"
    assert metric("log_loss").better == "down"
    assert metric("calibration").better is None
    assert find("epoch") is None
