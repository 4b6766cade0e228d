"""Which backend takes a run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from embark.errors import UserError
from embark.launch.backend import Backend, RunHandle, Tell
from embark.launch.shell import Shell
from embark.spec import RunSpec


class Place(Backend, Protocol):
    """A backend that can also say what a run will be found by."""

    def handle_of(self, spec: RunSpec) -> RunHandle: ...


def backend_for(spec: RunSpec, shell: Shell, tell: Tell) -> Place:
    """By `place`: without a machine and a cloud it is this machine."""
    place = spec.place
    if not place.machine and not place.cloud:
        return _local(shell, tell)
    if place.target in ("job", "jobset", "trainjob", "pytorchjob"):
        return _kubernetes(shell, tell)
    raise UserError(f'place.target = "{place.target}" is not handed over by embark launch',
                    fix="embark render writes its files and the script that starts it; or set place.target to job, "
                        "jobset, trainjob or pytorchjob")


def backend_of(handle: RunHandle, shell: Shell, tell: Tell, *, is_hasty: bool = False) -> Place:
    """Of a run that was handed over. `is_hasty`: a place that does not answer is not waited for."""
    if handle.backend not in _BACKENDS:
        raise UserError(f"{handle.name} was launched on {handle.backend!r}, which this version does not know",
                        fix="use the version that launched it")
    return _BACKENDS[handle.backend](shell, tell, is_hasty)


def _local(shell: Shell, tell: Tell, is_hasty: bool = False) -> Place:
    from embark.launch.local import Local

    return Local(shell, tell=tell)


def _kubernetes(shell: Shell, tell: Tell, is_hasty: bool = False) -> Place:
    from embark.launch.kubectl import Patience
    from embark.launch.kubernetes import Kubernetes

    return Kubernetes(shell, tell=tell, patience=Patience(give_up_s=0.0) if is_hasty else None)


_BACKENDS: dict[str, Callable[[Shell, Tell, bool], Place]] = {"local": _local, "kubernetes": _kubernetes}
