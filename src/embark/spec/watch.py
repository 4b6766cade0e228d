"""`[watch]`: which metrics are recorded, and where they are sent."""

from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt

from embark.spec.section import Section

Sinks = Annotated[tuple[Literal["cloudwatch", "otlp", "wandb", "mlflow"], ...], Field(strict=False)]


class WatchSpec(Section):
    """`[watch]`: which metrics are recorded, and where they are sent."""

    every: PositiveInt = 50
    """Steps between `step` events, the points of the curves."""
    tensorboard: bool = True
    """Write TensorBoard curves into the run directory."""
    system_every_s: NonNegativeFloat = 5.0
    """Seconds between samples of the machines (CPU, memory, network, disk, GPU) and of every rank's times; 0: none."""
    phases_every_s: NonNegativeFloat | Literal["auto"] = "auto"
    """Seconds between profiles of three steps by torch's profiler; 0: none. `auto`: 60 on a CPU, none on a GPU."""
    prometheus_port: int = Field(default=0, ge=0, le=65_535)
    """Rank 0 serves Prometheus metrics on this port, at `/metrics`; 0: off."""
    prometheus_host: str = Field(default="0.0.0.0", min_length=1)
    """Address to listen on; `127.0.0.1` for this machine only."""
    sinks: Sinks = ()
    """Where else metrics are sent: `cloudwatch`; `otlp`, for Azure Monitor, Cloud Monitoring and other collectors;
    `wandb`; `mlflow`. Endpoints and credentials come from the standard environment variables."""
    send_every_s: PositiveFloat = 30.0
    """Seconds between uploads to them."""
    project: str = Field(default="", pattern=r"^[^\\#?%:]*$", max_length=128)
    """W&B project and MLflow experiment; empty: that of `WANDB_PROJECT` or `MLFLOW_EXPERIMENT_NAME`, else `embark`."""
    cloudwatch_namespace: str = Field(default="Embark", pattern=r"^[A-Za-z0-9 ._/#:-]+$", max_length=255)
    """CloudWatch namespace of the metrics."""
