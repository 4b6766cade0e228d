"""What runs the pods here: containers, or process groups. And where the files of the pods lie meanwhile."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from embark.launch.shell import LineStream
from embark.rehearse.downscale import Change
from embark.rehearse.pods import Mount, Pod


@dataclass(frozen=True, slots=True)
class Start:
    """One start of a pod's container."""

    pod: Pod
    number: int
    """Counted over all starts of all pods."""
    generation: int
    """Of the pod: a container that the kubelet starts again is in the same pod, and sees what it left."""

    @property
    def key(self) -> str:
        return f"{self.pod.name}#{self.number}"


class Engine(Protocol):
    """Starts pods, and does to them what a cloud does."""

    name: str
    can_cut: bool
    folders: Folders

    def changes(self) -> list[Change]:
        """What is not as in the cluster because of how pods are run here."""
        ...

    def begin(self) -> None: ...

    def start(self, start: Start) -> LineStream:
        """Its lines; how it ended is how the program ends."""
        ...

    def term(self, start: Start) -> None:
        """SIGTERM to its first process."""
        ...

    def kill(self, start: Start) -> None:
        """All of it, at once."""
        ...

    def sweep(self, start: Start) -> None:
        """What is left of a pod whose first process has ended."""
        ...

    def pause(self, start: Start) -> None: ...

    def resume(self, start: Start) -> None: ...

    def cut(self, start: Start) -> None: ...

    def rejoin(self, start: Start) -> None: ...

    def close(self, *, keep: bool) -> str:
        """Ends what runs, and takes away what was made, but for the folders. What is left where `keep` says so."""
        ...


@dataclass(frozen=True, slots=True)
class Folders:
    """Where mounts lie on this machine, below one folder."""

    root: Path

    def of(self, mount: Mount, start: Start) -> Path:
        """The folder, or the file, of a mount; made if it is not there."""
        own = self.root / "pods" / start.pod.name / str(start.generation)
        if mount.kind == "files":
            path = own / "files" / mount.name
            path.mkdir(parents=True, exist_ok=True)
        elif mount.kind == "shared":
            path = self._open(self.root / "shared" / mount.name)
        else:
            path = self._open(own / mount.kind / mount.name)
        for name, text in mount.files.items():
            file = path / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text, encoding="utf-8")
        if mount.sub_path:
            path = path / mount.sub_path
            if mount.kind != "files":
                self._open(path)
        return path

    def workdir(self, start: Start) -> Path:
        """Where a process starts that has no image to start in."""
        return self._open(self.root / "pods" / start.pod.name / str(start.generation) / "workdir")

    def find(self, path: str, start: Start) -> Path | None:
        """Where a path that the pod sees lies here; None where it is inside of the container."""
        for mount in sorted(start.pod.mounts, key=lambda one: -len(one.path)):
            if path == mount.path or path.startswith(mount.path.rstrip("/") + "/"):
                return self.of(mount, start) / path[len(mount.path):].lstrip("/")
        return None

    @staticmethod
    def _open(path: Path) -> Path:
        # The pods' user is none of this machine.
        path.mkdir(parents=True, exist_ok=True)
        path.chmod(0o777)
        return path
