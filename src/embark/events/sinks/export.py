"""Writes what Prometheus and Grafana are given: `python -m embark.events.sinks.export FOLDER`."""

import sys
from pathlib import Path

from embark.events.alerts import rules_text
from embark.events.grafana import dashboard_text

RULES = "embark_rules.yaml"
DASHBOARD = "embark_dashboard.json"


def export(folder: Path) -> None:
    """The alert rules and the dashboard."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / RULES).write_text(rules_text(), encoding="utf-8")
    (folder / DASHBOARD).write_text(dashboard_text(), encoding="utf-8")


if __name__ == "__main__":
    export(Path(sys.argv[1] if len(sys.argv) > 1 else "."))
