"""TorchX's Kubernetes scheduler, which creates Volcano jobs."""

import json
import re
import sys
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

from embark.catalog import load_catalog
from embark.errors import MissingPackage, UserError
from embark.formatting import to_one_line
from embark.launch.backend import LaunchRequest, Resource, RunHandle
from embark.launch.backends.kubernetes.backend import Kubernetes, require_image
from embark.launch.backends.kubernetes.kubectl import NoSuchKind, classify_error
from embark.launch.backends.kubernetes.status import KINDS
from embark.launch.run_registry import registry_dir
from embark.render.job import make_job
from embark.render.targets.torchx import component
from embark.spec import RunSpec
from embark.store import write_atomic

COMPONENT = "cloud_component.py"
APP = "app.json"
SUBMIT_S = 120.0
INSTALL_VOLCANO = ("helm repo add volcano-sh https://volcano-sh.github.io/helm-charts && helm install volcano "
                   "volcano-sh/volcano --namespace volcano-system --create-namespace; or another place.target")


class TorchX(Kubernetes):
    """Volcano names the object, so its name is saved beside the component."""

    name = "torchx"

    def handle_of(self, spec: RunSpec) -> RunHandle:
        handle = super().handle_of(spec)
        # Two contexts may each have a run of this name.
        mark = re.sub(r"[^A-Za-z0-9.-]+", "-", handle.where["context"]) or "current"
        folder = registry_dir() / "torchx" / f"{spec.name}@{mark}"
        return replace(handle, where={**handle.where, "folder": str(folder), "config": ""})

    def check(self, request: LaunchRequest) -> None:
        if not self._shell.is_dry and find_spec("torchx") is None:
            raise MissingPackage("TorchX is not installed", fix="pip install 'torchx-nightly[kubernetes]'")
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
            raise self._exists(f"the Volcano job {same[0]} in namespace {place.namespace}", request.handle)

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
            if classify_error(done) in ("away", "token", "forbidden"):
                raise self._cluster(handle).error(done)
            lines = [line for line in done.err.splitlines() if line.strip()]
            raise UserError(f"TorchX refused it: {to_one_line(lines[-1])[:600] if lines else f'code {done.code}'}",
                            fix=f"{sys.executable} -m torchx.cli.main run --dryrun … says more")
        write_atomic(folder / APP, json.dumps({"name": _app_name(done.out)}))

    def _object(self, handle: RunHandle) -> str:
        """Return the name that TorchX gave the job; if that was not saved, the newest that starts with the run's."""
        try:
            return str(json.loads((handle.folder / APP).read_text())["name"])
        except (OSError, ValueError, KeyError):
            pass
        found = [one["metadata"] for one in self._jobs(handle)]
        newest = max(found, key=lambda one: str(one.get("creationTimestamp", "")), default=None)
        return str(newest["name"]) if newest else handle.where["object"]

    def _jobs(self, handle: RunHandle) -> list[dict[str, Any]]:
        """Return all attempts at this run: TorchX appends random characters to the name."""
        name = re.compile(re.escape(f"{handle.where['object']}-") + r"[a-z0-9]+")
        return [one for one in self._kubectl(handle).items(self._kind(handle).name)
                if name.fullmatch(str(one["metadata"]["name"]))]

    def _small_objects(self, handle: RunHandle) -> list[str]:
        return []


def _app_name(out: str) -> str:
    """Return the name in `{"app_id": "namespace:name", …}`."""
    answer = next((line for line in reversed(out.splitlines()) if line.startswith("{")), "{}")
    try:
        return str(json.loads(answer)["app_id"]).rpartition(":")[2]
    except (ValueError, KeyError) as error:
        raise UserError(f"TorchX did not report what it created: {to_one_line(out)[:200]}",
                        fix="pip install a newer torchx-nightly: --json is needed") from error
