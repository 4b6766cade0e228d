"""The user's cache directory: what any run of this user may use again, and what may be deleted at any time."""

import os
from pathlib import Path


def user_cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "embark"


def compiled_code_folder(compiler: str, otherwise: Path) -> Path:
    """Where a compiler keeps what it compiled for all runs of this user; `otherwise` where nothing can be written
    there, as in a container whose user has no home."""
    try:
        folder = user_cache().absolute() / compiler
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, RuntimeError):  # RuntimeError: there is no home directory to expand `~` to
        return otherwise
    return folder if os.access(folder, os.W_OK | os.X_OK) else otherwise
