"""Where compiled kernels stay, so that a run that goes on need not compile them again."""

from __future__ import annotations

import os
from pathlib import Path


def keep_kernels_in(run_path: Path) -> None:
    """Have Triton keep what it compiles with the run's files, unless the user has said where."""
    os.environ.setdefault("TRITON_CACHE_DIR", str(run_path.absolute() / "cache" / "triton"))
