"""The parameters that several commands share."""

from typing import Annotated

from cyclopts import Parameter

Flag = Annotated[bool, Parameter(negative="", show_default=False)]
"""A switch that is off unless given; there is no `--no-…`."""
Spec = Annotated[str, Parameter(
    help="A TOML file, a preset (laptop, quickstart, criteo-1tb, mlperf-dcnv2, mlperf-hstu) or module:function.")]
Settings = Annotated[tuple[str, ...], Parameter(
    name=("--set", "-s"), help="Override a field: --set train.batch_size=4096. Repeatable.", negative="",
    show_default=False)]
Accepted = Annotated[tuple[str, ...], Parameter(
    name="--accept-change", help="Resume although this field, or data, is not what the checkpoints were trained with. "
    "Repeatable.", negative="", show_default=False)]
