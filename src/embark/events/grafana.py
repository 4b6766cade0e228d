"""A dashboard for Grafana, made from the list of metrics: a row a group, a panel a metric."""

import json
from typing import Any

from embark.events.alerts import HOT_C
from embark.events.metrics import METRICS, TRAINING_GROUPS, UNITS, metric
from embark.events.sinks.prometheus import RUN as RUN_LABEL
from embark.events.sinks.prometheus import prometheus_name

NUM_COLUMNS, PANEL_SIZE, STAT_SIZE = 24, 8, 4
STATS = ("is_running", "last_step", "loss", "auc", "samples_per_s", "step_s")  # What is shown large at the top.
LIMITS = {"host_used_bytes": "host_bytes", "gpu_used_bytes": "gpu_total_bytes", "step_s": "predicted_step_s",
          "auc": "best_auc", "log_loss": "best_log_loss"}
"""Drawn into the same panel: what is available, what was predicted, the ceiling."""


def dashboard() -> dict[str, Any]:
    """What Grafana imports, or is provisioned with."""
    import jinja2

    environment = jinja2.Environment(loader=jinja2.PackageLoader("embark.events", ""), undefined=jinja2.StrictUndefined)
    environment.filters["labelled"] = lambda name: f"{{{{{name}}}}}"
    text = environment.get_template("grafana.json.j2").render(
        run=RUN_LABEL, metric=metric, prometheus_name=prometheus_name, panels=_panels(), limits=LIMITS, hot_c=HOT_C,
        unit=lambda one: UNITS["grafana"].get(one.unit, "short"))
    found: dict[str, Any] = json.loads(text)
    return found


def dashboard_text() -> str:
    """The same as a file."""
    return json.dumps(dashboard(), indent=2, ensure_ascii=False) + "\n"


def _panels() -> list[tuple[str, Any, int, int]]:
    """Kind, metric or heading, x and y."""
    panels: list[tuple[str, Any, int, int]] = [
        ("stat", metric(name), place * STAT_SIZE, 0) for place, name in enumerate(STATS)]
    y = STAT_SIZE
    for group in TRAINING_GROUPS:
        shown = [one for one in METRICS if one.group == group and one.name not in LIMITS.values()]
        if shown:
            panels.append(("row", group, 0, y))
            places = [divmod(place * PANEL_SIZE, NUM_COLUMNS) for place in range(len(shown))]
            panels += [("timeseries", one, x, y + 1 + line * PANEL_SIZE)
                       for one, (line, x) in zip(shown, places, strict=True)]
            y += 1 + (places[-1][0] + 1) * PANEL_SIZE
    return panels
