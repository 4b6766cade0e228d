"""TorchX: its Kubernetes scheduler, which makes Volcano jobs, and on this machine its `local_cwd` scheduler."""

import json
import re
import socket
import sys
from collections.abc import Iterable, Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from embark.catalog import load_catalog
from embark.errors import MissingPackage, UserError
from embark.formatting import pluralize, to_one_line
from embark.kubernetes.names import dns_label
from embark.launch.backend import LaunchRequest, LogLine, Resource, RunHandle
from embark.launch.backends.kubernetes.backend import Kubernetes, require_image
from embark.launch.backends.kubernetes.kubectl import NoSuchKind, classify_error
from embark.launch.backends.kubernetes.status import KINDS
from embark.launch.backends.local import Local, num_gpus
from embark.launch.run_registry import registry_dir
from embark.launch.shell import CommandResult
from embark.render.job import make_job
from embark.render.targets.torchx import component, component_here
from embark.spec import RunSpec
from embark.store import write_atomic
from embark.store.run_dir import SPEC

COMPONENT = "cloud_component.py"
APP = "app.json"
SUBMIT_S = 120.0
INSTALL_VOLCANO = ("helm repo add volcano-sh https://volcano-sh.github.io/helm-charts && helm install volcano "
                   "volcano-sh/volcano --namespace volcano-system --create-namespace; or another place.target")
GRACE_S = 10  # From SIGTERM to SIGKILL, as TorchX has it.
_REPLICA = re.compile(r"(?:\x1b\[[0-9;]*m)*trainer/(\d+)(?:\x1b\[[0-9;]*m)* ")


class TorchX(Kubernetes):
    """Volcano names the object, so its name is saved beside the component."""

    name = "torchx"

    def handle_of(self, spec: RunSpec) -> RunHandle:
        handle = super().handle_of(spec)
        # Two contexts may each have a run of this name.
        mark = re.sub(r"[^A-Za-z0-9.-]+", "-", str(handle.where["context"])) or "current"
        folder = registry_dir() / "torchx" / f"{spec.name}@{mark}"
        return replace(handle, where={**handle.where, "folder": str(folder), "config": ""})

    def check(self, request: LaunchRequest) -> None:
        require_torchx(is_dry=self._shell.is_dry)
        place, cluster = request.spec.place, self._cluster(request.handle)
        require_image(request.spec)
        now = cluster.current_context(self._shell)
        if now != cluster.context and not self._shell.is_dry:
            raise UserError(f"TorchX uses kubectl's current context, which is {now}, not {cluster.context}",
                            fix=f"kubectl config use-context {cluster.context}")
        try:
            jobs = self._jobs(request.handle)
        except NoSuchKind as error:
            raise NoSuchKind("the cluster has no Volcano, which TorchX's Kubernetes scheduler needs",
                             fix=INSTALL_VOLCANO) from error
        same = [one["metadata"]["name"] for one in jobs if not KINDS["torchx"].read(one)["status"]["conditions"]]
        if same:
            raise UserError(f"the Volcano job {same[0]} already exists in namespace {place.namespace}",
                            fix=f"embark status {request.handle.name}; embark cancel {request.handle.name} deletes it")

    def submit(self, request: LaunchRequest) -> None:
        handle, place, folder = request.handle, request.spec.place, request.handle.folder
        if not self._shell.is_dry:
            (folder / APP).unlink(missing_ok=True)
            write_atomic(folder / COMPONENT, component(make_job(request.spec, load_catalog())))
        self._make_namespace(request, self._kubectl(handle))
        request.record(Resource(f"the Volcano job {handle.where['object']}-… in namespace {place.namespace}",
                         f"embark cancel {handle.name}"))
        done = self._shell.change(
            [sys.executable, "-m", "torchx.cli.main", "run", "--json", "--workspace", "", "--scheduler", "kubernetes",
             "--scheduler_args", f"queue={place.queue or 'default'},namespace={place.namespace}",
             f"{folder / COMPONENT}:train"], timeout_s=SUBMIT_S)
        if self._shell.is_dry:
            return
        if not done.is_ok:
            raise self._refused(done, handle)
        write_atomic(folder / APP, json.dumps({"name": _app_name(done.out)}))

    def _object(self, handle: RunHandle) -> str:
        """The name that TorchX gave it; where that was not saved, the newest that starts with the run's."""
        try:
            return str(json.loads((handle.folder / APP).read_text())["name"])
        except (OSError, ValueError, KeyError):
            pass
        found = [one["metadata"] for one in self._jobs(handle)]
        newest = max(found, key=lambda one: str(one.get("creationTimestamp", "")), default=None)
        return str(newest["name"]) if newest else str(handle.where["object"])

    def _jobs(self, handle: RunHandle) -> list[dict[str, Any]]:
        """All attempts at this run: TorchX adds a mark to the name."""
        name = re.compile(re.escape(f"{handle.where['object']}-") + r"[a-z0-9]+")
        return [one for one in self._kubectl(handle).items(self._kind(handle).name)
                if name.fullmatch(str(one["metadata"]["name"]))]

    def _small_objects(self, handle: RunHandle) -> list[str]:
        return []

    def _refused(self, done: CommandResult, handle: RunHandle) -> Exception:
        if classify_error(done) in ("away", "token", "forbidden"):
            return self._cluster(handle).error(done)
        lines = [line for line in done.err.splitlines() if line.strip()]
        return UserError(f"TorchX refused it: {to_one_line(lines[-1])[:600] if lines else f'code {done.code}'}",
                         fix=f"{sys.executable} -m torchx.cli.main run --dryrun … says more")


def require_torchx(*, is_dry: bool = False) -> None:
    if not is_dry and find_spec("torchx") is None:
        raise MissingPackage("TorchX is not installed", fix="pip install 'torchx-nightly[kubernetes]'")


def _app_name(out: str) -> str:
    """Of `{"app_id": "namespace:name", …}`."""
    answer = next((line for line in reversed(out.splitlines()) if line.startswith("{")), "{}")
    try:
        return str(json.loads(answer)["app_id"]).rpartition(":")[2]
    except (ValueError, KeyError) as error:
        raise UserError(f"TorchX did not report what it created: {to_one_line(out)[:200]}",
                        fix="pip install a newer torchx-nightly: --json is needed") from error


class TorchXLocal(Local):
    """`place.nodes` replicas side by side, each as many ranks as there are GPUs for it."""

    def handle_of(self, spec: RunSpec) -> RunHandle:
        handle, place = super().handle_of(spec), spec.place
        found = 0 if place.device == "cpu" else num_gpus()
        num_ranks = max(1, found // place.max_nodes)
        where = {**handle.where, "folder": str(registry_dir() / "torchx" / spec.name), "num_ranks": num_ranks,
                 "num_nodes": place.max_nodes, "use_gpu": int(found > 0), "grace_s": GRACE_S, "port": _free_port()}
        title = f"{spec.name} on this machine, by TorchX: {pluralize(place.max_nodes * num_ranks, 'rank')}"
        return replace(handle, backend="torchx-local", where=where, title=title)

    def check(self, request: LaunchRequest) -> None:
        require_torchx(is_dry=self._shell.is_dry)
        super().check(request)

    def submit(self, request: LaunchRequest) -> None:
        where, folder = request.handle.where, request.handle.folder
        if not self._shell.is_dry:
            write_atomic(folder / COMPONENT, component_here(
                name=dns_label(request.handle.name), num_nodes=int(where["num_nodes"]),
                num_processes=int(where["num_ranks"]), use_gpu=bool(where["use_gpu"]), python=sys.executable,
                spec_path=str(folder / SPEC), port=int(where["port"]),
                # TorchX kills what has not ended ten seconds after SIGTERM.
                env={"PYTHONUNBUFFERED": "1", "EMBARK_GRACE_S": str(GRACE_S - 2)}))
        super().submit(request)

    def logs(self, handle: RunHandle, *, follow: bool = False) -> Iterator[LogLine]:
        return by_replica(super().logs(handle, follow=follow))

    def _command(self, handle: RunHandle, folder: Path) -> list[str]:
        return [sys.executable, "-m", "torchx.cli.main", "run", "--workspace", "", "--scheduler", "local_cwd",
                "--scheduler_args", f"log_dir={folder / 'replicas'}", f"{folder / COMPONENT}:train"]


def by_replica(lines: Iterable[LogLine]) -> Iterator[LogLine]:
    """TorchX prints what it finds in a replica's file, a part of a line too, each time with the replica's name before
    it: only what is last in a line has ended, and what is before another name is continued later."""
    begun: dict[str, str] = {}
    last: dict[str, LogLine] = {}
    for line in lines:
        other, *named = _REPLICA.split(line.text)
        if other or not named:
            yield replace(line, source="torchx", text=other, index=None)
        for replica, text in zip(named[::2], named[1::2], strict=True):
            begun[replica] = begun.get(replica, "") + text
            last[replica] = line
        if named:
            yield _replica_line(line, named[-2], begun.pop(named[-2]))
    for replica, text in begun.items():
        yield _replica_line(last[replica], replica, text)


def _replica_line(line: LogLine, replica: str, text: str) -> LogLine:
    return replace(line, source=f"machine {replica}", text=text, index=int(replica))


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
