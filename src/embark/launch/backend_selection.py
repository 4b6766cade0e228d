"""Which backend takes a run."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from embark.errors import UserError
from embark.launch.backend import Backend, Notify, RunHandle
from embark.launch.shell import Shell
from embark.spec import RunSpec

if TYPE_CHECKING:
    from embark.launch.backends.kubernetes.kubectl import Patience


class Place(Backend, Protocol):
    """A backend that can also say what a run will be found by."""

    def handle_of(self, spec: RunSpec) -> RunHandle: ...


def backend_for(spec: RunSpec, shell: Shell, tell: Notify, *, context: str = "") -> Place:
    """By `place`: its target and, for some targets, whether it names a machine. `context`: of kubectl, if not its own.
    """
    name = _name_of(spec)
    if name not in _BACKENDS:
        raise UserError(f'place.target = "{spec.place.target}" is not handed over by embark launch',
                        fix="embark render writes its files and the script that starts it; or set place.target to "
                            + ", ".join(_BY_TARGET))
    if not context:
        return _BACKENDS[name](shell, tell, False)
    if name not in _IN_CONTEXTS:
        raise UserError(f"--context is kubectl's, and this run goes to {name}", fix="leave --context out")
    return _IN_CONTEXTS[name](shell, tell, context)


def backend_of(handle: RunHandle, shell: Shell, tell: Notify, *, is_hasty: bool = False) -> Place:
    """Of a run that was handed over. `is_hasty`: a place that does not answer is not waited for."""
    if handle.backend not in _BACKENDS:
        raise UserError(f"{handle.name} was launched on {handle.backend!r}, which this version does not know",
                        fix="use the version that launched it")
    return _BACKENDS[handle.backend](shell, tell, is_hasty)


def _local(shell: Shell, tell: Notify, is_hasty: bool = False) -> Place:
    from embark.launch.backends.local.backend import Local

    return Local(shell, tell=tell)


def _kubernetes(shell: Shell, tell: Notify, is_hasty: bool = False) -> Place:
    from embark.launch.backends.kubernetes.backend import Kubernetes

    return Kubernetes(shell, tell=tell, patience=_patience(is_hasty))


def _kubernetes_in(shell: Shell, tell: Notify, context: str) -> Place:
    from embark.launch.backends.kubernetes.backend import Kubernetes

    return Kubernetes(shell, tell=tell, context=context)


def _ray(shell: Shell, tell: Notify, is_hasty: bool = False) -> Place:
    from embark.launch.backends.ray.backend import Ray

    return Ray(shell, tell=tell, patience=_patience(is_hasty))


def _torchx(shell: Shell, tell: Notify, is_hasty: bool = False) -> Place:
    from embark.launch.backends.torchx.backend import TorchX

    return TorchX(shell, tell=tell, patience=_patience(is_hasty))


def _torchx_in(shell: Shell, tell: Notify, context: str) -> Place:
    from embark.launch.backends.torchx.backend import TorchX

    return TorchX(shell, tell=tell, context=context)


def _torchx_here(shell: Shell, tell: Notify, is_hasty: bool = False) -> Place:
    from embark.launch.backends.torchx.local_scheduler import TorchXLocal

    return TorchXLocal(shell, tell=tell)


def _vertex(shell: Shell, tell: Notify, is_hasty: bool = False) -> Place:
    from embark.launch.backends.vertex.backend import Vertex

    return Vertex(shell, tell=tell, patience=_patience(is_hasty))


def _vm(shell: Shell, tell: Notify, is_hasty: bool = False) -> Place:
    from embark.launch.backends.vm.backend import Vm

    return Vm(shell, tell=tell, is_hasty=is_hasty)


def _tpu_vm(shell: Shell, tell: Notify, is_hasty: bool = False) -> Place:
    from embark.launch.backends.tpu_vm.backend import TpuVm

    return TpuVm(shell, tell=tell, is_hasty=is_hasty)


def _patience(is_hasty: bool) -> Patience | None:
    from embark.launch.backends.kubernetes.kubectl import Patience

    return Patience(give_up_s=0.0) if is_hasty else None


def _name_of(spec: RunSpec) -> str:
    """Of the backend; empty where there is none."""
    place = spec.place
    is_here = not place.machine and not place.cloud
    if place.target == "ray":
        from embark.launch.backends.ray.backend import address

        return "ray" if is_here or address() else "kubernetes"
    return _HERE.get(place.target, "local") if is_here else _BY_TARGET.get(place.target, "")


_BACKENDS: dict[str, Callable[[Shell, Notify, bool], Place]] = {
    "local": _local,
    "kubernetes": _kubernetes,
    "ray": _ray,
    "torchx": _torchx,
    "torchx-here": _torchx_here,
    "vertex": _vertex,
    "vm": _vm,
    "tpu-vm": _tpu_vm,
}
_IN_CONTEXTS: dict[str, Callable[[Shell, Notify, str], Place]] = {"kubernetes": _kubernetes_in, "torchx": _torchx_in}
"""Those that kubectl's contexts choose between."""
_BY_TARGET = {
    "job": "kubernetes", "jobset": "kubernetes", "trainjob": "kubernetes", "pytorchjob": "kubernetes",
    "ray": "ray", "torchx": "torchx", "vertex": "vertex", "vm": "vm", "tpu-vm": "tpu-vm",
}
"""By `place.target`, for a machine of a cloud."""
_HERE = {"torchx": "torchx-here"}
"""The same where no machine is named, for targets that mean another thing than this machine as it is."""
