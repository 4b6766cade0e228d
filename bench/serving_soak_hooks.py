"""What `serving_soak.py` does inside a process of Embark: hold a publisher at a point, end it there, plant a defect."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

PLANTS = ()
PLANT = "EMBARK_SOAK_PLANT"
HOLD_S = 60.0


def disturb(rank: int, plant: str = "", hold: str = "", die: str = "") -> None:
    """Plant a defect, if one is named; `hold` is a file at which a publisher with a verdict waits for another; `die`
    is a function of the publisher in whose place it is killed."""
    if plant:
        plant_defect(plant)
    if hold:
        hold_verdict(Path(hold))
    if die:
        from embark.publish import publisher

        setattr(publisher, die, lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL))


def hold_verdict(mark: Path) -> None:
    """Say by a file that the verdict is made, and wait until the file is gone."""
    from embark.publish import publisher

    judge = publisher.judge

    def judge_and_wait(*words: Any, **more: Any) -> Any:
        verdict, until = judge(*words, **more), time.monotonic() + HOLD_S
        mark.touch()
        while mark.exists() and time.monotonic() < until:
            time.sleep(0.005)
        return verdict

    publisher.judge = judge_and_wait


def plant_defect(name: str) -> None:
    """Plant a defect in this process, and in those that it starts by `sitecustomize`."""
    os.environ[PLANT] = name
    globals()[f"plant_{name}"]()
