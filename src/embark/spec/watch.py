"""`[watch]`: what is told while it runs, and to whom."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt

from embark.spec.section import Section

Sinks = Annotated[tuple[Literal["cloudwatch", "otlp"], ...], Field(strict=False)]


class WatchSpec(Section):
    """`[watch]`: what is told while it runs."""

    every: PositiveInt = 50
    """Steps between two `step` events: the points of the curves."""
    tensorboard: bool = True
    """Write TensorBoard curves into the run directory."""
    system_every_s: NonNegativeFloat = 5.0
    """Seconds between two looks at the machines (processors, memory, network, disks, GPUs) and at the times of every
    rank; 0: none."""
    phases_every_s: NonNegativeFloat | Literal["auto"] = "auto"
    """Seconds between two looks, by torch's profiler and of three steps each, at where a step's time goes; 0: none.
    `auto`: a minute on a CPU, none on a GPU."""
    prometheus_port: int = Field(default=0, ge=0, le=65_535)
    """Rank 0 answers Prometheus on this port, under `/metrics`; 0: not."""
    prometheus_host: str = Field(default="0.0.0.0", min_length=1)
    """The address it listens at; `127.0.0.1` keeps it to this machine."""
    sinks: Sinks = ()
    """Where else the metrics go: `cloudwatch`; `otlp`, which the collectors of Azure Monitor, Cloud Monitoring and
    others take. Whom to reach and as whom is said by the tools' own environment variables."""
    send_every_s: PositiveFloat = 30.0
    """Seconds between two sendings to them."""
    cloudwatch_namespace: str = Field(default="Embark", pattern=r"^[A-Za-z0-9 ._/#:-]+$", max_length=255)
    """What CloudWatch files the metrics under."""
