"""`python -m embark.launch.backends.local.supervisor FOLDER`: keeps a local run's process. Its lines get their time, its end is written.

A process that outlives its terminal has no parent that could be asked how it ended.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path

from embark.launch.shell import Kept
from embark.store import write_atomic

ORDER = "order.json"
LOG = "log"
ENDED = "ended.json"
STARTED = "started.json"


def main(folder: Path) -> int:
    order = json.loads((folder / ORDER).read_text())
    stopping: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: stopping.append(number))
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    mine = process_mark(os.getpid())
    write_atomic(folder / STARTED, json.dumps({"pid": os.getpid(), "mark": mine, "time_s": time.time()}))
    kept = Kept(order["words"], folder=Path(order["cwd"]), env={**os.environ, **_env(order)})

    def stop(number: int, _: object) -> None:
        stopping.append(number)
        kept.send(signal.SIGTERM)

    signal.signal(signal.SIGTERM, stop)
    if stopping:  # it came before there was anyone to pass it to
        kept.send(signal.SIGTERM)
    with (folder / LOG).open("ab", buffering=0) as log:
        for line in kept.lines():
            stamp = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ").encode()
            log.write(stamp + b" " + line + b"\n")
    code = kept.wait()
    write_atomic(folder / ENDED, json.dumps({"code": code, "was_stopped": bool(stopping), "time_s": time.time()}))
    return max(code, 0)


def process_mark(pid: int) -> str:
    """Tells a process from a later one with its number; empty where there is none."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""
    fields = stat.rpartition(")")[2].split()
    return "" if fields[0] in "ZX" else f"{boot} {fields[19]}"


def _env(order: Mapping[str, Mapping[str, str]]) -> dict[str, str]:
    return {str(name): str(value) for name, value in order["env"].items()}


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
