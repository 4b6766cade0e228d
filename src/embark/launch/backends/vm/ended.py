"""Whether a run whose machines are gone had come to its end: its own events say it."""

from __future__ import annotations

import json

from embark.errors import EmbarkError
from embark.launch.backend import RunHandle

EVENTS = "events.jsonl"
ENDS = ("done", "budget")
"""Outcomes after which it is not to go on."""


def has_ended_well(handle: RunHandle, since_s: float) -> bool | None:
    """None where its events cannot be read from here. What ended before `since_s` was an earlier launch's."""
    from embark.store import open_store
    from embark.store.retry_policy import RetryPolicy

    hasty = RetryPolicy(max_retries=1, connect_s=5.0, silence_s=10.0, request_s=20.0, give_up_s=20.0)
    try:
        store = open_store(handle.run_uri.removeprefix("file://"), hasty)
        if not store.exists(EVENTS):
            return False
        text = store.read(EVENTS).decode(errors="replace")
    except (EmbarkError, ImportError, OSError):
        return None
    for line in reversed(text.splitlines()):
        try:
            event = json.loads(line)
        except ValueError:
            continue
        if isinstance(event, dict) and event.get("event") == "end":
            return event.get("outcome") in ENDS and float(event.get("time_s", 0.0)) >= since_s
    return False
