"""Alert rules for Prometheus; diagnoses use the same limits."""

import tomllib
from dataclasses import dataclass
from importlib.resources import files
from typing import Any, Literal

from embark.events.metrics import METRICS
from embark.events.sinks.prometheus import RUN, prometheus_name

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
