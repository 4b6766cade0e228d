"""`embark`, but each rank waits once, at step HELD_AT of its process, until the test lets it go.

A rank that waits touches `held-WORLD_SIZE-RANK` in HELD_DIR, and goes on when there is `go-WORLD_SIZE`, or when it has
caught a signal.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

from embark.__main__ import main
from embark.run.stop import Decision, StopCoordinator


def hold(folder: Path, at: int, world_size: str, rank: str) -> None:
    decide, num_calls = StopCoordinator.decide, 0

    def held(self: StopCoordinator, **options: Any) -> Decision:
        nonlocal num_calls
        num_calls += 1
        if num_calls == at:
            (folder / f"held-{world_size}-{rank}").touch()
            while not (folder / f"go-{world_size}").exists() and not self.signals.caught:
                time.sleep(0.01)
        return decide(self, **options)

    StopCoordinator.decide = held  # type: ignore[method-assign]


if __name__ == "__main__":
    hold(Path(os.environ["HELD_DIR"]), int(os.environ["HELD_AT"]), os.environ["WORLD_SIZE"], os.environ["RANK"])
    sys.exit(main())
