"""Alert rules for Prometheus; diagnoses use the same limits."""

import json
import sys
import tomllib
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

from embark.events.metrics import METRICS, TRAINING_GROUPS, UNITS, metric
from embark.events.sinks.prometheus import RUN, prometheus_name
from embark.events.sinks.prometheus import RUN as RUN_LABEL

IDLE_PERCENT = 5
IDLE_MINUTES = 30  # Longer than a checkpoint, an evaluation and a restart take.
STALLED_MINUTES = 15
SLOW_RANK = 1.3  # Times the median of the other ranks: a rank that takes longer is slow.
INPUT_SHARE = 0.3  # Of a step, the part that waiting for data may take.
SLOW_STEP = 2.0  # Times what was predicted.
SAVE_HOURS = 6
HOT_C = 88
FULL = 0.95  # Of a machine's memory.


@dataclass(frozen=True, slots=True)
class Alert:
    """One rule."""

    name: str
    expression: str
    minutes: int  # How long the expression must be true.
    severity: Literal["critical", "warning"]
    what: str  # What happens, and what to do.


def alerts() -> tuple[Alert, ...]:
    """All of them, with metrics by their Prometheus names and the limits of this module filled in."""
    values = {metric.name: prometheus_name(metric) for metric in METRICS}
    values |= {name: f"{value:g}" for name, value in globals().items() if isinstance(value, int | float)}
    values |= {"run": RUN, "running": f"on ({RUN}) {values['is_running']} == 1", "IDLE_SHARE": f"{IDLE_PERCENT / 100}",
               "STALLED_S": f"{STALLED_MINUTES * 60}"}
    rows = tomllib.loads(files("embark.events").joinpath("alerts.toml").read_text(encoding="utf-8"))["alert"]
    filled = [{name: text.format_map(values) for name, text in row.items()} for row in rows]
    return tuple(Alert(**{**row, "minutes": int(row.get("minutes", 0))}) for row in filled)


def alert_rules(prefix: str = "") -> list[dict[str, Any]]:
    """As Prometheus takes them, in files and in Kubernetes objects."""
    return [{"alert": one.name, "expr": one.expression, "for": f"{one.minutes}m", "labels": {"severity": one.severity},
             "annotations": {"summary": f"{prefix}{one.what}"}} for one in alerts()]


def rules_text() -> str:
    """A file for Prometheus' `rule_files`."""
    import yaml

    groups = {"groups": [{"name": "embark", "rules": alert_rules(f"{{{{ $labels.{RUN} }}}}: ")}]}
    return str(yaml.safe_dump(groups, sort_keys=False, width=120, allow_unicode=True))


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


RULES = "embark_rules.yaml"
DASHBOARD = "embark_dashboard.json"


def export(folder: Path) -> None:
    """The alert rules and the dashboard."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / RULES).write_text(rules_text(), encoding="utf-8")
    (folder / DASHBOARD).write_text(dashboard_text(), encoding="utf-8")


if __name__ == "__main__":
    export(Path(sys.argv[1] if len(sys.argv) > 1 else "."))
