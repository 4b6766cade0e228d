"""This machine: `embark serve`, supervised: it outlives the terminal and is started again after a crash."""

import socket
import sys
from dataclasses import replace
from pathlib import Path

from embark.errors import UserError
from embark.export.artifact import current_version, no_versions, open_versions
from embark.launch.backend import LaunchRequest, Resource, RunHandle, Status
from embark.launch.backends.local import Local
from embark.launch.run_registry import registry_dir
from embark.render.serving import artifact_of, server_name
from embark.spec import RunSpec
from embark.spec.serve import DRAIN_S
from embark.spec.user_code import file_of
from embark.store import write_atomic

PORT = 8000


class LocalServer(Local):
    """Serves an exported model here."""

    restarts = True
    source = "server"
    ending = "it answers what it accepted"
    resumed = "embark launch starts it again"

    def handle_of(self, spec: RunSpec) -> RunHandle:
        artifact = artifact_of(spec)
        artifact = artifact if "://" in artifact else str(Path(artifact).expanduser().absolute())
        name, port = server_name(spec.name), _free_port()
        where: dict[str, str | int] = {
            "folder": str(registry_dir() / "local" / name), "cwd": str(Path.cwd()), "port": port,
            "model_file": file_of(spec.model.kind) if spec.model.is_own else "", "grace_s": DRAIN_S + 5,
        }
        return RunHandle(name=name, backend="local-server", where=where, run_uri=artifact,
                         title=f"{name} on this machine: http://127.0.0.1:{port}")

    def check(self, request: LaunchRequest) -> None:
        super().check(request)
        place = request.handle.run_uri
        if not current_version(open_versions(place)):
            raise no_versions(place)

    def submit(self, request: LaunchRequest) -> None:
        if name := str(request.handle.where["model_file"]):
            write_atomic(request.handle.folder / name, request.spec.model.code)
        super().submit(request)

    def status(self, handle: RunHandle) -> Status:
        status = super().status(handle)
        if self._state(handle).was_stopped:
            return replace(status, state="gone", reason="stopped", fix=self.resumed)
        return status

    def remains(self, handle: RunHandle) -> tuple[Resource, ...]:
        return (artifact_remains(handle),)

    def _command(self, handle: RunHandle, folder: Path) -> list[str]:
        own = [f"--model-file={folder / str(name)}"] if (name := handle.where["model_file"]) else []
        return [sys.executable, "-m", "embark", "serve", handle.run_uri, f"--port={handle.where['port']}", *own]


def artifact_remains(handle: RunHandle) -> Resource:
    return Resource(f"the exported model in {handle.run_uri}", "remains until you delete it")


def _free_port() -> int:
    """The usual one, or any where another program has it."""
    for port in (PORT, 0):
        try:
            with socket.create_server(("127.0.0.1", port)) as listener:
                return int(listener.getsockname()[1])
        except OSError:
            continue
    raise UserError("no port of 127.0.0.1 is free", fix="end a program that listens there")
