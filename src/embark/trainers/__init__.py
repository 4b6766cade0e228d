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
    """Train a spec on this machine: start it, resume it, or leave a finished run alone; see `run.loop.train`.

    Returns the values of the last evaluation and of the end. `view` are sinks for the run's events.
    """
    from embark.run.loop import train as train_with

    return train_with(spec, open_backend(spec), view, fresh=fresh, signals=signals)


def open_backend(spec: RunSpec) -> Backend:
    """The library that `place` asks for, checked and loaded."""
    from embark.stack.versions import require_stack
    from embark.trainers.jax.packages import require_jax, wants_jax

    if wants_jax(spec):
        require_jax(spec)
        from embark.trainers.jax.trainer import JaxBackend

        return JaxBackend()
    require_stack()
    from embark.trainers.torch.trainer import TorchBackend

    return TorchBackend()
