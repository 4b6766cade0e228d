"""Which backend takes a run."""

from importlib import import_module

from embark.errors import UserError
from embark.launch.backend import Notify, RunHandle
from embark.launch.backends.base import Backend
from embark.launch.http import NO_RETRY
from embark.launch.shell import Shell
from embark.spec import RunSpec
from embark.store.retry_policy import RetryPolicy

BACKENDS = {
    "local": "local.backend:Local", "kubernetes": "kubernetes.backend:Kubernetes", "ray": "ray.backend:Ray",
    "torchx": "torchx.backend:TorchX", "torchx-local": "torchx.backend:TorchXLocal",
    "vertex": "vertex.backend:Vertex", "vm": "vm.backend:Vm", "tpu-vm": "tpu_vm.backend:TpuVm",
}
TARGETS = {
    "job": "kubernetes", "jobset": "kubernetes", "trainjob": "kubernetes", "pytorchjob": "kubernetes",
    "ray": "ray", "torchx": "torchx", "vertex": "vertex", "vm": "vm", "tpu-vm": "tpu-vm",
}
"""By `place.target`, for a machine of a cloud."""
USES_KUBECTL = ("kubernetes", "torchx")


def backend_for(spec: RunSpec, shell: Shell, notify: Notify, *, context: str = "") -> Backend:
    """By the spec's place: its target and, for some targets, whether it names a machine.

    `context`: of kubectl, if not its current one.
    """
    name = _name_of(spec)
    if not name:
        raise UserError(f'embark launch does not support place.target = "{spec.place.target}"',
                        fix="embark render writes its files and the script that starts it; or set place.target to "
                            + ", ".join(TARGETS))
    if context and name not in USES_KUBECTL:
        raise UserError(f"--context is kubectl's, and this run goes to {name}", fix="leave --context out")
    return _load(name, shell, notify, context=context)


def backend_of(handle: RunHandle, shell: Shell, notify: Notify, *, is_hasty: bool = False) -> Backend:
    """Of a launched run. `is_hasty`: a platform that does not answer is not waited for."""
    if handle.backend not in BACKENDS:
        raise UserError(f"{handle.name} was launched on {handle.backend!r}, which this version does not know",
                        fix="use the version that launched it")
    return _load(handle.backend, shell, notify, retry=NO_RETRY if is_hasty else None)


def _load(name: str, shell: Shell, notify: Notify, *, retry: RetryPolicy | None = None, context: str = "") -> Backend:
    module, _, kind = BACKENDS[name].partition(":")
    loaded = getattr(import_module(f"embark.launch.backends.{module}"), kind)
    backend: Backend = loaded(shell, notify=notify, retry=retry, context=context)
    return backend


def _name_of(spec: RunSpec) -> str:
    """Of the backend; empty where there is none."""
    place = spec.place
    is_here = not place.machine and not place.cloud
    if place.target == "ray":
        from embark.launch.backends.ray.backend import address

        return "ray" if is_here or address() else "kubernetes"
    if is_here:
        return "torchx-local" if place.target == "torchx" else "local"
    return TARGETS.get(place.target, "")
