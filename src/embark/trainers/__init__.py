"""The training libraries behind `run.loop`: torch (TorchRec) and JAX (TPU). This file picks one and imports neither."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from embark.events import Sink
    from embark.run.signals import StopSignals
    from embark.run.trainer import Backend
    from embark.spec import RunSpec


def train(
    spec: RunSpec, view: Sequence[Sink] = (), *, fresh: bool = False, signals: StopSignals | None = None
) -> dict[str, Any]:
    """Train what `spec` says with the library it asks for; see `run.loop.train`."""
    from embark.run.loop import train as train_with

    return train_with(spec, open_backend(spec), view, fresh=fresh, signals=signals)


def open_backend(spec: RunSpec) -> Backend:
    """The library that `place` asks for, loaded."""
    from embark.trainers.jax.packages import wants_jax

    if wants_jax(spec):
        from embark.trainers.jax.backend import JaxBackend

        return JaxBackend()
    from embark.trainers.torch.backend import TorchBackend

    return TorchBackend()
