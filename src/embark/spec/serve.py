"""`[serve]`: how an exported model is deployed."""

from typing import Literal

from pydantic import Field, PositiveFloat, PositiveInt

from embark.spec.section import Section

DRAIN_S = 30  # Seconds after SIGTERM within which a server answers every request that it has accepted.


class ServeSpec(Section):
    """`[serve]`: how an exported model is deployed; for a `place.target` that serves."""

    artifact: str = Field(default="", max_length=400, pattern=r"^$|^[A-Za-z0-9_./:@-]+$")
    """Where `embark export` wrote to, in an object store; empty: `export` in the run's directory."""
    tables: Literal["fp32", "fp16", "int8", "int4"] = "fp32"
    """Type of the exported tables, which decides a replica's memory."""
    min_replicas: PositiveInt = 2
    """Replicas that always run; `embark plan --serve` says how many a rate needs."""
    max_replicas: PositiveInt = 10
    """Replicas at most."""
    requests_in_flight: PositiveInt = 2
    """Requests in flight in each replica on average, above which the autoscaler adds replicas."""
    autoscaler: Literal["hpa", "keda"] = "hpa"
    """What scales a Deployment: a HorizontalPodAutoscaler, or a ScaledObject of KEDA, which makes one."""
    prometheus: str = Field(default="http://prometheus-server.monitoring", max_length=200, pattern=r"^https?://[\w.:/-]+$")
    """The Prometheus that KEDA asks for the requests in flight."""
    memory_gib: PositiveFloat | None = None
    """Memory of a replica; default: the tables, the id maps and the process, as `embark plan --serve` counts them."""
    machine: str = Field(default="", max_length=100, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$|^$")
    """A machine without accelerators, such as `m7i.2xlarge`, on which alone replicas run; empty: on Kubernetes any node
    with room, of a managed endpoint the cheapest with room."""
