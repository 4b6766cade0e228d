"""TorchX on this machine: its `local_cwd` scheduler, whose processes live as long as `torchx run` does."""

import re
import socket
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from embark.formatting import pluralize
from embark.launch.backend import LaunchRequest, LogLine, RunHandle
from embark.launch.backends.local.backend import Local, num_gpus
from embark.launch.backends.torchx.backend import COMPONENT, require_torchx
from embark.launch.run_registry import registry_dir
from embark.render.job import dns_label
from embark.render.targets.torchx import component_here
from embark.spec import RunSpec
from embark.store import write_atomic

GRACE_S = 10
"""From SIGTERM to SIGKILL, as TorchX has it."""
_REPLICA = re.compile(r"(?:\x1b\[[0-9;]*m)*trainer/(\d+)(?:\x1b\[[0-9;]*m)* (.*)", re.DOTALL)


class TorchXLocal(Local):
    """`place.nodes` replicas side by side, each as many ranks as there are GPUs for it."""

    def handle_of(self, spec: RunSpec) -> RunHandle:
        handle, place = super().handle_of(spec), spec.place
        found = 0 if place.device == "cpu" else num_gpus()
        num_ranks = max(1, found // place.nodes)
        where = {**handle.where, "folder": str(registry_dir() / "torchx" / spec.name), "num_ranks": num_ranks,
                 "num_nodes": place.nodes, "use_gpu": int(found > 0), "grace_s": GRACE_S, "port": _free_port()}
        title = f"{spec.name} on this machine, by TorchX: {pluralize(place.nodes * num_ranks, 'rank')}"
        return replace(handle, backend="torchx-local", where=where, title=title)

    def check(self, request: LaunchRequest) -> None:
        require_torchx(is_dry=self._shell.is_dry)
        super().check(request)

    def submit(self, request: LaunchRequest) -> None:
        where = request.handle.where
        folder = Path(str(where["folder"]))
        if not self._shell.is_dry:
            write_atomic(folder / COMPONENT, component_here(
                name=dns_label(request.handle.name), num_nodes=int(where["num_nodes"]),
                num_processes=int(where["num_ranks"]), use_gpu=bool(where["use_gpu"]), python=sys.executable,
                spec_path=str(folder / "spec.toml"), port=int(where["port"]),
                # TorchX kills what has not ended ten seconds after SIGTERM.
                env={"PYTHONUNBUFFERED": "1", "EMBARK_GRACE_S": str(GRACE_S - 2)}))
        super().submit(request)

    def logs(self, handle: RunHandle, *, follow: bool = False) -> Iterator[LogLine]:
        for line in super().logs(handle, follow=follow):
            match = _REPLICA.fullmatch(line.text)
            if match:
                yield replace(line, source=f"machine {match[1]}", text=match[2], index=int(match[1]))
            else:
                yield replace(line, source="torchx", index=None)

    def _command(self, handle: RunHandle, folder: Path) -> list[str]:
        return [sys.executable, "-m", "torchx.cli.main", "run", "--workspace", "", "--scheduler", "local_cwd",
                "--scheduler_args", f"log_dir={folder / 'replicas'}", f"{folder / COMPONENT}:train"]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
