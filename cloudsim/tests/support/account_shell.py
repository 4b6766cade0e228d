"""Runs shell text in an account: its programs come first on the PATH and answer from its state."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from cloudsim.account import Account
from cloudsim.headline import find_headline
from cloudsim.server import AccountServer
from embark.render.folder import File


@dataclass(frozen=True)
class ScriptResult:
    code: int
    output: str
    headline: str  # Why it failed.


def write_files(files: Sequence[File], folder: Path) -> None:
    for file in files:
        path = folder / file.path
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(file.text if isinstance(file.text, bytes) else file.text.encode())
        path.chmod(0o755 if file.is_executable else 0o644)


def run_shell(account: Account, text: str, folder: Path, env: Mapping[str, str] | None = None) -> ScriptResult:
    """Run bash in a folder. The account answers in this thread, because an engine that it starts sets signal
    handlers."""
    programs, before = account.folder / "programs", len(account.records)
    path = os.pathsep.join([str(programs), str(Path(sys.executable).parent), os.environ["PATH"]])
    variables = {"PATH": path, "HOME": str(account.folder), "YES": "1", **account.environment, **(env or {})}
    with AccountServer(account) as server:
        server.write_shims(programs)
        server.timeout = 0.02
        lines: list[str] = []
        with subprocess.Popen(["bash", "-c", text], cwd=folder, env=variables, stdin=subprocess.DEVNULL, text=True,
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
            reader = threading.Thread(target=lambda: lines.extend(process.stdout or ()), daemon=True)
            reader.start()
            while process.poll() is None:
                server.handle_request()
            reader.join()
    headline, _ = find_headline("".join(lines), account.records[before:], account.causes)
    return ScriptResult(process.returncode, "".join(lines), headline)
