"""The newest lines of a run's logs, or of its events as text, that match a filter."""

from collections import deque
from collections.abc import Iterator
from typing import Any

from embark.dashboard.api import clock_text, event_text
from embark.dashboard.runs import Run
from embark.events.events import parse_event
from embark.formatting import strip_control_chars
from embark.report.run_files import EVENTS
from embark.store.errors import without_secrets

MAX_LINES = 500
MAX_LINE_CHARS = 2000
MAX_READ_BYTES = 32 << 20
"""From the end of a file: a filter searches no further back."""
MAX_EVENT_BYTES = 8 << 20
"""The same of events, which are slower to show."""
PIECE_BYTES = 1 << 20
_LEVELS = {"error": ("error", "fatal", "critical", "traceback", "exception"), "warning": ("warn",)}


def log_lines(run: Run, *, file: int, words: str) -> dict[str, Any]:
    """`file` 0 is the events, others the run's logs in order. A line matches if it holds all words, in any case."""
    logs = run.files.logs()
    name = EVENTS if file <= 0 or file > len(logs) else logs[file - 1].name
    wanted = words.lower().split()
    found: deque[dict[str, Any]] = deque()
    for line in _lines_backward(run, name, MAX_EVENT_BYTES if name == EVENTS else MAX_READ_BYTES):
        shown = _event_line(line) if name == EVENTS else {"text": line.decode("utf-8", "replace")}
        text = shown["text"].lower()
        if not text.strip() or not all(word in text or word == shown.get("kind") for word in wanted):
            continue
        shown["text"] = without_secrets(strip_control_chars(shown["text"][:MAX_LINE_CHARS]))
        shown.setdefault("level", _level(text))
        found.appendleft(shown)
        if len(found) >= MAX_LINES:
            break
    names = [strip_control_chars(log.name) for log in logs]
    return {"file": 0 if name == EVENTS else file, "files": ["events", *names], "lines": list(found)}


def _event_line(line: bytes) -> dict[str, Any]:
    event = parse_event(line)
    if event is None:
        return {"text": line.decode("utf-8", "replace"), "kind": "unread", "time": ""}
    level = "error" if event.kind == "error" else str(event.values.get("level", "")) if event.kind == "note" else ""
    return {"text": event_text(event), "kind": strip_control_chars(event.kind)[:40], "time": clock_text(event.time_s),
            "level": level if level in ("warning", "error") else ""}


def _level(text: str) -> str:
    return next((level for level, signs in _LEVELS.items() if any(sign in text for sign in signs)), "")


def _lines_backward(run: Run, name: str, max_bytes: int) -> Iterator[bytes]:
    """The newest first, read a piece at a time."""
    end = run.files.size_bytes(name) or 0
    least = max(0, end - max_bytes)
    rest = b""
    while end > least:
        start = max(least, end - PIECE_BYTES)
        piece = run.files.read(name, start, end - start)
        first, *lines = (piece + rest).split(b"\n")
        yield from reversed(lines)
        rest, end = first[-PIECE_BYTES:], start
        if not piece:
            return
    if least == 0:
        yield rest
