"""A dashboard for Grafana, made from the list of metrics: a row a group, a panel a metric."""

import json
from typing import Any

from embark.events.alerts import HOT_C
from embark.events.metrics import GROUPS, METRICS, RUN, Metric, metric
from embark.events.sinks.prometheus import RUN as RUN_LABEL
from embark.events.sinks.prometheus import prometheus_name

NUM_COLUMNS = 24
PANEL_WIDTH, PANEL_HEIGHT = 8, 8
STAT_WIDTH, STAT_HEIGHT = 4, 4
SOURCE = {"type": "prometheus", "uid": "${source}"}
UNITS = {"s": "s", "B": "bytes", "B/s": "Bps", "samples/s": "short", "%": "percentunit", "W": "watt", "°C": "celsius",
         "USD": "currencyUSD", "USD/h": "currencyUSD"}
"""Grafana's names for ours; of a percentage, as Prometheus has it: a ratio."""
STATS = ("is_running", "last_step", "loss", "auc", "samples_per_s", "step_s")
"""What is shown large at the top."""
WITH_LIMIT = {"host_used_bytes": "host_bytes", "gpu_used_bytes": "gpu_total_bytes", "step_s": "predicted_step_s",
              "auc": "best_auc", "log_loss": "best_log_loss"}
"""Drawn into the same panel: what is available, what was predicted, the ceiling."""


def dashboard() -> dict[str, Any]:
    """What Grafana imports, or is provisioned with."""
    return {
        "uid": "embark-runs",
        "title": "Embark",
        "tags": ["embark"],
        "schemaVersion": 39,
        "editable": True,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "timezone": "browser",
        "graphTooltip": 1,
        "templating": {"list": [
            {"name": "source", "label": "Prometheus", "type": "datasource", "query": "prometheus"},
            {"name": RUN_LABEL, "label": "run", "type": "query", "datasource": SOURCE, "multi": True,
             "includeAll": True, "refresh": 2, "sort": 1,
             "query": {"query": f"label_values({prometheus_name(metric('last_step'))}, {RUN_LABEL})", "refId": "runs"}},
        ]},
        "annotations": {"list": [_mark("checkpoints", "num_saves", "green"), _mark("resumes", "num_resumes", "orange"),
                                 _mark("errors", "num_errors", "red")]},
        "panels": _panels(),
    }


def dashboard_text() -> str:
    """The same as a file."""
    return json.dumps(dashboard(), indent=2, ensure_ascii=False) + "\n"


def _panels() -> list[dict[str, Any]]:
    panels = [_stat(metric(name), place) for place, name in enumerate(STATS)]
    y = STAT_HEIGHT
    limits = set(WITH_LIMIT.values())
    for group in GROUPS:
        shown = [one for one in METRICS if one.group == group and one.name not in limits and group != RUN]
        if not shown:
            continue
        panels.append({"type": "row", "title": group, "collapsed": False, "panels": [],
                       "gridPos": {"x": 0, "y": y, "w": NUM_COLUMNS, "h": 1}})
        y += 1
        for place, one in enumerate(shown):
            x = place * PANEL_WIDTH % NUM_COLUMNS
            panels.append(_graph(one, x, y))
            if x + PANEL_WIDTH == NUM_COLUMNS or one is shown[-1]:
                y += PANEL_HEIGHT
    return [{"id": number, **panel} for number, panel in enumerate(panels, 1)]


def _stat(one: Metric, place: int) -> dict[str, Any]:
    return {
        "type": "stat", "title": one.label, "description": one.meaning, "datasource": SOURCE,
        "gridPos": {"x": place * STAT_WIDTH, "y": 0, "w": STAT_WIDTH, "h": STAT_HEIGHT},
        "targets": [_target(one, "A")], "fieldConfig": _field(one),
        "options": {"reduceOptions": {"calcs": ["lastNotNull"]}, "graphMode": "area", "textMode": "value_and_name"},
    }


def _graph(one: Metric, x: int, y: int) -> dict[str, Any]:
    targets = [_target(one, "A")]
    if one.name in WITH_LIMIT:
        targets.append(_target(metric(WITH_LIMIT[one.name]), "B"))
    field = _field(one)
    if one.name == "phase_s":
        field["defaults"]["custom"] = {"stacking": {"mode": "normal"}, "fillOpacity": 60}
    if one.name == "gpu_temperature_c":
        field["defaults"]["thresholds"] = {"mode": "absolute", "steps": [{"color": "green", "value": None},
                                                                         {"color": "red", "value": HOT_C}]}
    return {
        "type": "timeseries", "title": one.label, "description": one.meaning, "datasource": SOURCE,
        "gridPos": {"x": x, "y": y, "w": PANEL_WIDTH, "h": PANEL_HEIGHT}, "targets": targets, "fieldConfig": field,
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}},
    }


def _target(one: Metric, letter: str) -> dict[str, Any]:
    legend = " ".join(f"{{{{{label}}}}}" for label in (RUN_LABEL, *one.labels))
    return {"refId": letter, "datasource": SOURCE, "expr": _query(one),
            "legendFormat": f"{legend} {one.label}" if letter == "B" else legend}


def _mark(name: str, counter: str, colour: str) -> dict[str, Any]:
    query = f'changes({prometheus_name(metric(counter))}{{{RUN_LABEL}=~"${RUN_LABEL}"}}[1m]) > 0'
    return {"name": name, "enable": True, "iconColor": colour, "datasource": SOURCE, "expr": query,
            "titleFormat": f"{name}: {{{{{RUN_LABEL}}}}}"}


def _query(one: Metric) -> str:
    return f'{prometheus_name(one)}{{{RUN_LABEL}=~"${RUN_LABEL}"}}'


def _field(one: Metric) -> dict[str, Any]:
    return {"defaults": {"unit": UNITS.get(one.unit, "short")}, "overrides": []}
