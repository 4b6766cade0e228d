"""What the run's own bookkeeping asks of a trainer, whichever library it is written in."""

from __future__ import annotations

from typing import Any, Protocol


class Ranks(Protocol):
    """Those that train together: processes, each with one device or, in JAX, with a machine's."""

    @property
    def rank(self) -> int: ...

    @property
    def world_size(self) -> int: ...

    @property
    def is_first(self) -> bool: ...

    def sum_of(self, numbers: list[int]) -> list[int]: ...

    def gathered(self, value: Any) -> list[Any]: ...


class Shown(Protocol):
    """The same, as a person counts them."""

    @property
    def is_first(self) -> bool: ...

    @property
    def device(self) -> Any:
        """Its `type` is `cpu`, `cuda`, `tpu`."""

    @property
    def device_name(self) -> str: ...

    @property
    def world_size(self) -> int: ...

    @property
    def local_world_size(self) -> int: ...

    @property
    def device_bytes(self) -> int:
        """Memory of one GPU; 0 for anything else."""


class Model(Protocol):
    """What was built from the spec."""

    @property
    def engine(self) -> Any:
        """With its `name` and the `reason` for it."""

    @property
    def layout(self) -> dict[str, Any]: ...

    @property
    def precision(self) -> str: ...

    @property
    def num_parameters(self) -> int: ...


class Saver(Protocol):
    """Writes checkpoints; each call returns those that have been written since the last."""

    def begin(self, step: int, values: dict[str, Any]) -> list[Any]: ...

    def done(self) -> list[Any]: ...

    def wait(self) -> list[Any]: ...
