"""What platforms report, in sentences with fixes; the table is explanations.toml."""

import re
import tomllib
from functools import cache
from pathlib import Path

from embark.launch.backend import Reason


def explain(topic: str, message: str, **values: str) -> list[Reason]:
    """Every row of the topic whose pattern is in the message, in the table's order. `values` fill in {names}."""
    found = []
    for pattern, text, fix in _table()[topic]:
        match = pattern.search(message)
        if match:
            groups = {"{1}": (match[1] or "") if pattern.groups else "", **{f"{{{k}}}": v for k, v in values.items()}}
            for name, value in groups.items():
                text, fix = text.replace(name, value), fix.replace(name, value)
            found.append(Reason(text, fix))
    return found


def explain_exit(code: int, reason: str = "") -> Reason:
    found = explain("exit", reason if reason == "OOMKilled" else str(code))
    return found[0] if found else Reason(f"exit code {code}", "embark logs says why")


def explain_unschedulable(message: str) -> Reason:
    """Of the scheduler's message: every cause that is in it, followed by the message."""
    found = explain("pod", message)
    if not found:
        return Reason(message or "not scheduled yet")
    return Reason(f"{'; '.join(dict.fromkeys(one.text for one in found))} ({message})", found[0].fix)


def explain_waiting(reason: str, message: str) -> Reason:
    """Of a container that does not run."""
    known = explain("waiting", reason)
    if not known:
        return Reason(": ".join(part for part in (reason, message) if part))
    explained = explain_unschedulable(message) if message else Reason("")
    if explained.fix:
        return explained
    return Reason(f"{known[0].text} ({message})" if message else known[0].text, known[0].fix)


def explain_preemption(reason: str, message: str) -> str:
    return next((one.text for one in explain("preempted", reason)), message or reason)


@cache
def _table() -> dict[str, list[tuple[re.Pattern[str], str, str]]]:
    rows = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
    return {topic: [(re.compile(row["pattern"], re.DOTALL), row["text"], row.get("fix", "")) for row in found]
            for topic, found in rows.items()}
