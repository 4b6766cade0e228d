"""Where an exported model is scored with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from embark.errors import UserError

DeviceKind = Literal["auto", "cpu", "cuda"]
Precision = Literal["fp32", "tf32", "bf16"]


@dataclass(frozen=True, slots=True)
class ScoringDevice:
    """The device that a model is served from, and how its dense layers are computed there."""

    kind: DeviceKind = "auto"  # `auto`: the GPU where there is one.
    precision: Precision = "tf32"  # Precision of dense layers on a GPU; on a CPU see `ExportedModel`.

    def __post_init__(self) -> None:
        for name, value, known in (("device", self.kind, get_args(DeviceKind)),
                                   ("precision", self.precision, get_args(Precision))):
            if value not in known:
                raise UserError(f"--{name} {value}: is none of {', '.join(known)}", fix=f"leave out --{name}")
