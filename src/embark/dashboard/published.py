"""A line about the versions of a run that were published and refused; read at most every ten seconds."""

import time
import tomllib
from functools import lru_cache

from embark.errors import EmbarkError
from embark.export.rollback import list_versions
from embark.formatting import format_count, pluralize, to_one_line

_EVERY_S = 10
PUBLISH = "[publish]"


def published_text(run: str, spec_text: str) -> str:
    """Of a run whose spec has `[publish]`; empty of others, and where its versions cannot be read."""
    return _read(run, spec_text, int(time.monotonic() / _EVERY_S)) if PUBLISH in spec_text else ""


@lru_cache(maxsize=64)
def _read(run: str, spec_text: str, _moment: int) -> str:
    try:
        place = tomllib.loads(spec_text)["publish"].get("to") or f"{run}/export"
        versions = list_versions(place).versions
    except (EmbarkError, OSError, ValueError, KeyError, TypeError, AttributeError):
        return ""
    current = next((one for one in versions if one.is_current), None)
    refused = [one for one in versions if one.refused]
    words = [f"version {current.version} (step {format_count(current.step)})" if current else "none yet",
             f"{pluralize(len(versions) - len(refused), 'version')} kept"]
    if refused:
        words.append(f"{len(refused)} refused, the last: {to_one_line(refused[-1].refused)}")
    return "; ".join(words)
