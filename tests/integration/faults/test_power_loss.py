"""What a loss of power would leave, at every system call of a run that saves: a complete checkpoint, always."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from integration.faults.conftest import SPEC

pytestmark = [pytest.mark.slow, pytest.mark.needs("strace")]

CALLS = ("openat,write,pwrite64,copy_file_range,sendfile,?mkdir,mkdirat,fsync,fdatasync,?rename,?renameat,renameat2,"
         "?link,linkat,?unlink,unlinkat,?rmdir")
"""Those with a question mark are not on every processor."""
CALL = re.compile(r"^(\d+) +(?:<\.\.\. )?(\w+)(?: resumed>|\()(.*)$")


@dataclass
class Disk:
    """What is surely on it, by the rules of POSIX: data when the file was synced, a name when its directory was.

    A deletion may reach it at once. A rename may, too: what it names must be there before.
    """

    root: str
    unsynced: set[str] = field(default_factory=set)
    names: set[str] = field(default_factory=set)
    """On the disk for sure."""
    pending: dict[str, set[str]] = field(default_factory=dict)
    """By directory: names that a sync of it will make sure."""
    commits: list[str] = field(default_factory=list)

    def apply(self, call: str, paths: list[str]) -> None:
        path = paths[-1] if paths else ""
        if not path.startswith(self.root):
            return
        if call in ("write", "pwrite64", "copy_file_range", "sendfile"):
            self.unsynced.add(path)
        elif call in ("fsync", "fdatasync"):
            self.unsynced.discard(path)
            self.names |= self.pending.pop(path, set())
        elif call in ("mkdir", "mkdirat"):
            self._named(path)
        elif call.startswith(("rename", "link")):
            old = paths[0]
            assert old not in self.unsynced, f"{path} is named before its data is synced"
            if path.endswith("/commit.json"):
                self.commits.append(os.path.dirname(path))
                others = {p for p in self.seen_in(os.path.dirname(path)) if p != path}
                assert others <= self.names, f"{path} before {sorted(others - self.names)} is on the disk"
            self._named(path)
        elif call in ("unlink", "unlinkat", "rmdir"):
            self.names.discard(path)
            for waiting in self.pending.values():
                waiting.discard(path)

    def seen_in(self, folder: str) -> set[str]:
        """Files that a process would see there."""
        everywhere = self.names.union(*self.pending.values()) if self.pending else self.names
        return {path for path in everywhere if os.path.dirname(path) == folder}

    def complete(self) -> list[str]:
        """Checkpoints whose files, and all directories above them, are on the disk."""
        return [folder for folder in self.commits
                if f"{folder}/commit.json" in self.names and all(p in self.names for p in self._above(folder))
                and self.seen_in(folder) <= self.names]

    def _above(self, folder: str) -> Iterator[str]:
        while folder != self.root:
            yield folder
            folder = os.path.dirname(folder)

    def _named(self, path: str) -> None:
        self.pending.setdefault(os.path.dirname(path), set()).add(path)


def test_at_every_instant_a_complete_checkpoint_is_on_the_disk(tmp_path):
    spec, trace, root = tmp_path / "spec.toml", tmp_path / "trace", tmp_path / "runs"
    spec.write_text(SPEC)
    root.mkdir()
    command = [sys.executable, "-m", "embark", "train", str(spec), "--set", f"store.root={root}", "--set",
               "store.checkpoint_every=3", "--set", "store.keep_checkpoints=1"]
    done = subprocess.run(
        ["strace", "-f", "-y", "-s", "0", "--seccomp-bpf", "-e", f"trace={CALLS}", "-o", str(trace), *command],
        capture_output=True, text=True, cwd=tmp_path, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stdout + done.stderr
    disk = Disk(str(root))
    was_complete, num_calls = False, 0
    for call, paths in calls_of(trace):
        disk.apply(call, paths)
        num_calls += bool(paths and paths[-1].startswith(str(root)))
        is_complete = bool(disk.complete())
        assert is_complete or not was_complete, f"no complete checkpoint after {call} {paths}"
        was_complete = is_complete
    names = list(dict.fromkeys(Path(folder).name for folder in disk.commits))
    assert names == [f"step-{step:09d}" for step in (3, 6, 9, 12)]
    assert set(disk.complete()) == {disk.commits[-1]}  # written twice: its evaluation is added
    assert num_calls > 100


def calls_of(trace: Path) -> Iterator[tuple[str, list[str]]]:
    """Each call with the paths it names, syncs when they have returned, all others as soon as they are made."""
    begun: dict[tuple[str, str], list[str]] = {}
    for line in trace.read_text().splitlines():
        if not (match := CALL.match(line)):
            continue
        process, call, rest = match.groups()
        is_sync = call in ("fsync", "fdatasync")
        if "resumed>" in line:
            if is_sync:
                yield call, begun.pop((process, call))
            continue
        paths = re.findall(r'"([^"]+)"', rest) or re.findall(r"<(/[^>]*)>", rest)[:1]
        if call == "unlinkat" and (inside := re.match(r"\d+<(/[^>]*)>, \"([^\"]+)\"", rest)):
            paths = ["/".join(inside.groups())]
        if is_sync and "<unfinished" in rest:
            begun[process, call] = paths
        elif " = -1 " not in rest:
            yield call, paths
