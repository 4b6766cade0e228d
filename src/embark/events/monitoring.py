"""Alert rules for Prometheus and a dashboard for Grafana, made from the list of metrics; diagnoses use the same limits.

`python -m embark.events.monitoring FOLDER` writes both.
"""

import json
import sys
from pathlib import Path
from typing import Any, Literal

from embark.values import JsonDict, frozen, read_table
from .metrics import METRICS, TRAINING_GROUPS, UNITS, metric
from .sinks.prometheus import RUN, prometheus_name

IDLE_PERCENT = 5
IDLE_MINUTES = 30  # Longer than a checkpoint, an evaluation and a restart take.
STALLED_MINUTES = 15
SLOW_RANK = 1.3  # A rank is slow if it takes this many times the median of the others.
INPUT_SHARE = 0.3  # Share of a step that waiting for data may take.
SLOW_STEP = 2.0  # A step is slow if it takes this many times what was predicted.
SAVE_HOURS = 6
HOT_C = 88
FULL = 0.95  # Share of a machine's memory.


@frozen
class Alert:
    """One alert rule."""

    name: str
    expression: str
    minutes: int  # Minutes for which the expression must be true.
    severity: Literal["critical", "warning"]
    what: str  # The problem and its remedy.


def alerts() -> tuple[Alert, ...]:
    """Return all rules, with metrics by their Prometheus names and the limits of this module filled in."""
    values = {metric.name: prometheus_name(metric) for metric in METRICS}
    values |= {name: f"{value:g}" for name, value in globals().items() if isinstance(value, int | float)}
    values |= {"run": RUN, "running": f"on ({RUN}) {values['is_running']} == 1", "IDLE_SHARE": f"{IDLE_PERCENT / 100}",
               "STALLED_S": f"{STALLED_MINUTES * 60}"}
    rows = read_table(__file__, "alerts.toml")["alert"]
    filled = [{name: text.format_map(values) for name, text in row.items()} for row in rows]
    return tuple(Alert(**{**row, "minutes": int(row.get("minutes", 0))}) for row in filled)


def alert_rules(prefix: str = "") -> list[JsonDict]:
    """Return the rules in the form that Prometheus takes, in files and in Kubernetes objects."""
    return [{"alert": one.name, "expr": one.expression, "for": f"{one.minutes}m", "labels": {"severity": one.severity},
             "annotations": {"summary": f"{prefix}{one.what}"}} for one in alerts()]


def rules_text() -> str:
    """Write a file for Prometheus' `rule_files`."""
    import yaml

    groups = {"groups": [{"name": "embark", "rules": alert_rules(f"{{{{ $labels.{RUN} }}}}: ")}]}
    return str(yaml.safe_dump(groups, sort_keys=False, width=120, allow_unicode=True))


NUM_COLUMNS, PANEL_SIZE, STAT_SIZE = 24, 8, 4
STATS = ("is_running", "last_step", "loss", "auc", "samples_per_s", "step_s")  # Metrics shown large at the top.
LIMITS = {"host_used_bytes": "host_bytes", "gpu_used_bytes": "gpu_total_bytes", "step_s": "predicted_step_s",
          "auc": "best_auc", "log_loss": "best_log_loss"}
"""Metrics that are drawn into the panel of another: what is available, what was predicted, the ceiling."""


def dashboard() -> JsonDict:
    """Return what Grafana imports, or is provisioned with: a row for each group, a panel for each metric."""
    import jinja2

    environment = jinja2.Environment(loader=jinja2.PackageLoader("embark.events", ""), undefined=jinja2.StrictUndefined)
    environment.filters["labelled"] = lambda name: f"{{{{{name}}}}}"
    text = environment.get_template("grafana.json.j2").render(
        run=RUN, metric=metric, prometheus_name=prometheus_name, panels=_panels(), limits=LIMITS, hot_c=HOT_C,
        unit=lambda one: UNITS["grafana"].get(one.unit, "short"))
    found: JsonDict = json.loads(text)
    return found


def dashboard_text() -> str:
    """Write the dashboard as a file."""
    return json.dumps(dashboard(), indent=2, ensure_ascii=False) + "\n"


def _panels() -> list[tuple[str, Any, int, int]]:
    """Return kind, metric or heading, x and y of each panel."""
    panels: list[tuple[str, Any, int, int]] = [
        ("stat", metric(name), index * STAT_SIZE, 0) for index, name in enumerate(STATS)]
    y = STAT_SIZE
    for group in TRAINING_GROUPS:
        shown = [one for one in METRICS if one.group == group and one.name not in LIMITS.values()]
        if shown:
            panels.append(("row", group, 0, y))
            for index, one in enumerate(shown):
                line, x = divmod(index * PANEL_SIZE, NUM_COLUMNS)
                panels.append(("timeseries", one, x, y + 1 + line * PANEL_SIZE))
            y += 1 + (line + 1) * PANEL_SIZE
    return panels


def export(folder: Path) -> None:
    """Write the alert rules and the dashboard."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "embark_rules.yaml").write_text(rules_text(), encoding="utf-8")
    (folder / "embark_dashboard.json").write_text(dashboard_text(), encoding="utf-8")


if __name__ == "__main__":
    export(Path(sys.argv[1] if len(sys.argv) > 1 else "."))
