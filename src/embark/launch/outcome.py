"""How a run ended, by its own events: for a run whose machines are gone."""

import json

from embark.errors import EmbarkError
from embark.store import open_store
from embark.store.retry_policy import RetryPolicy

EVENTS = "events.jsonl"
NO_RETRY = RetryPolicy(max_retries=1, connect_s=5.0, silence_s=10.0, request_s=20.0, give_up_s=20.0)
"""For what is beside the point of a command: a store that does not answer is not waited for."""


def run_outcome(run_uri: str, since_s: float = 0.0) -> str | None:
    """`done`, `budget` or `interrupted`; empty: it has not ended since then; None: its events cannot be read here."""
    try:
        store = open_store(run_uri.removeprefix("file://"), NO_RETRY)
        if not store.exists(EVENTS):
            return ""
        text = store.read(EVENTS).decode(errors="replace")
    except (EmbarkError, ImportError, OSError):
        return None
    for line in reversed(text.splitlines()):
        try:
            event = json.loads(line)
        except ValueError:
            continue
        if isinstance(event, dict) and event.get("event") == "end":
            return str(event.get("outcome", "")) if float(event.get("time_s", 0.0)) >= since_s else ""
    return ""


def is_finished(outcome: str | None) -> bool:
    """After these outcomes a run is not started again."""
    return outcome in ("done", "budget")
