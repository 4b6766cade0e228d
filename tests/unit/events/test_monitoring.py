"""The dashboard has all that is measured, where a person finds it."""

import json

from embark.events.metrics import METRICS
from embark.events.monitoring import dashboard, dashboard_text, export, rules_text
from embark.events.sinks.prometheus import prometheus_name


def expressions() -> list[str]:
    """Every query of the dashboard, without what Grafana fills in."""
    shown = dashboard()
    queries = [target["expr"] for panel in shown["panels"] for target in panel.get("targets", ())]
    queries += [mark["expr"] for mark in shown["annotations"]["list"]]
    return [query.replace("$run", ".*") for query in queries]


def test_the_dashboard_shows_every_metric_that_changes():
    shown = " ".join(expressions())
    missing = [one.name for one in METRICS if f"{prometheus_name(one)}{{" not in shown]
    assert missing == ["num_steps", "world_size", "peak_bytes", "usd_per_hour", "spent_usd", "last_event_s",
                       *(one.name for one in METRICS if one.group == "Served traffic")]


def test_the_dashboard_s_panels_lie_side_by_side_and_have_ids_of_their_own():
    panels = dashboard()["panels"]
    taken = set()
    for panel in panels:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not cells & taken
        assert at["x"] + at["w"] <= 24
        taken |= cells
    assert len({panel["id"] for panel in panels}) == len(panels)


def test_the_file_is_the_dashboard_as_json():
    assert json.loads(dashboard_text()) == dashboard()


def test_every_panel_says_what_it_shows_and_in_what_unit():
    for panel in dashboard()["panels"]:
        if panel["type"] != "row":
            assert panel["description"]
            assert panel["fieldConfig"]["defaults"]["unit"]
            assert panel["targets"][0]["expr"].startswith("embark_")


def test_rules_and_dashboard_are_written_where_they_are_asked_for(tmp_path):
    export(tmp_path / "monitoring")
    assert json.loads((tmp_path / "monitoring" / "embark_dashboard.json").read_text()) == dashboard()
    assert (tmp_path / "monitoring" / "embark_rules.yaml").read_text() == rules_text()
