"""`gate.json` beside a version that was written to be published: the gate's verdict. Without it there was none yet."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from typing import Any

from embark.store import CheckpointStore, checkpoint_name
from embark.store.errors import NotFound

GATE = "gate.json"


def read_gate(versions: CheckpointStore, version: int) -> dict[str, Any] | None:
    """Return the gate's verdict on a version, or None if there is none."""
    try:
        found = json.loads(versions.store.read(f"{checkpoint_name(version, 'version')}/{GATE}"))
        return found if isinstance(found, dict) else None
    except (NotFound, ValueError):
        return None


def write_gate(versions: CheckpointStore, version: int, record: Mapping[str, Any]) -> None:
    """Write the record completely or not at all."""
    text = json.dumps({**record, "time_s": round(time.time(), 3)}, indent=1) + "\n"
    versions.store.write(f"{checkpoint_name(version, 'version')}/{GATE}", text.encode())
