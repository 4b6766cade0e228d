"""The newest metrics of all runs on the page, as Prometheus fetches them: of runs that ended, too."""

from __future__ import annotations

from embark.dashboard.runs import Run, Runs
from embark.events.events import Event
from embark.events.sinks.prometheus import exposition

MAX_RUNS = 100


def metrics_text(runs: Runs) -> str:
    """Two runs of one name are told apart by the page's own mark of them."""
    shown = runs.all()[:MAX_RUNS]
    names = [run.name for run in shown]
    return exposition({run.name if names.count(run.name) == 1 else f"{run.name} {run.id}": _told(run)
                       for run in shown})


def _told(run: Run) -> list[Event]:
    with run.lock:
        story = run.story
        told = story.told
        if story.systems:
            told.append(Event("ranks", {"systems": list(story.systems)}, time_s=story.last_s or 0.0))
        return told
