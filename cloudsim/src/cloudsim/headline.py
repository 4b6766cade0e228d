"""The one sentence that says why a script failed."""

import re
from collections.abc import Sequence

from cloudsim.account import Record

WAITS = ("sleep ", "kubectl wait ", "kubectl rollout ", "kubectl logs ")
"""Commands whose failure is a symptom of what they wait for."""
NEVER_ENDS = "waits for ever"  # What the session says of a program that it had to end.
NOTE = re.compile(r"^\+ |^The job goes on;| USD an hour")  # Commands that a script shows, and what it costs.


def find_headline(output: str, records: Sequence[Record], causes: Sequence[str]) -> tuple[str, Record | None]:
    """Return the cause of a script's failure, and the command that was refused if one was.

    A refused command counts only if the script shows its message at the end: the messages of probes are thrown away,
    and a script that goes on was not stopped by them. `causes` are why controllers wait; they explain scripts that have
    waited in vain, whose last words are no reason.
    """
    lines = [line.rstrip() for line in output.splitlines() if line.strip() and not NOTE.search(line)]
    said = _last_message(lines)
    shown = [one for one in records if one.code == 0 or _last_line(one) in lines]
    last = next((one for one in reversed(shown) if one.code), None)
    if last is None or _last_line(last) not in lines[-2:]:
        more = f" ({said})" if NEVER_ENDS in said else ""
        return f"{causes[0]}{more}" if causes else said, None
    # A command that was given the missing answer of another fails after it.
    while (before := shown.index(last) - 1) >= 0 and shown[before].code:
        last = shown[before]
    error = " ".join(last.error.split())
    # A wait for one object is explained by that object's cause if it has one.
    named = {word.rpartition("/")[2] for word in last.words}
    causes = sorted(causes, key=lambda one: one.split()[1].rstrip(":") not in named)
    is_wait = "--wait" in last.words or f"{last.program} {' '.join(last.words)}".startswith(WAITS)
    return causes[0] if causes and is_wait else error, last


def _last_line(record: Record) -> str:
    return record.error.rstrip().rpartition("\n")[2]


def _last_message(lines: Sequence[str]) -> str:
    """Return the last line, with those before it that it continues."""
    first = len(lines) - 1
    while first > 0 and (lines[first].startswith((" ", "\t")) or lines[first].startswith("fix:")):
        first -= 1
    return " ".join(line.strip() for line in lines[max(0, first):])
