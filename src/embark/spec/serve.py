"""`[serve]` and `[publish]`: how an exported model is deployed, and where versions go while it trains."""

from typing import Annotated, Literal, get_args

from pydantic import Field, NonNegativeFloat, PositiveFloat

from embark.errors import UserError
from embark.values import frozen
from .place import IDENTITY, LABEL
from .section import Many, Names, NonNegativeInt, PositiveInt, Section

Namespaces = Many[Annotated[str, Field(max_length=63, pattern=rf"{LABEL}|^\*$")]]
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
    autoscaler: Literal["hpa", "adapter", "keda"] = "hpa"
    """What scales a Deployment. `hpa`: a HorizontalPodAutoscaler on CPU alone. `adapter`: one on requests in flight
    too, which an adapter for custom metrics in the cluster has to serve. `keda`: a ScaledObject of KEDA on both, which
    asks `prometheus`."""
    prometheus: str = Field(default="http://prometheus-operated.monitoring:9090", max_length=200,
                            pattern=r"^https?://[\w.:/-]+$")
    """The Prometheus that KEDA asks for the requests in flight."""
    max_surge: NonNegativeInt | None = None
    """Replicas that a rollout starts before it ends an old one: the nodes need room for them. With 0 one replica ends
    before its successor starts. Default: 0, and 1 where `min_replicas` is 1."""
    auth: Literal["token", "none"] = "token"
    """`token`: on Kubernetes, requests need the bearer token that the Secret `NAME-serve-token` has as `token`. `none`:
    whatever is before the servers decides who may ask."""
    tls_secret: str = Field(default="", max_length=63, pattern=r"^$|^[a-z0-9]([a-z0-9.-]*[a-z0-9])?$")
    """A Kubernetes Secret of the type `kubernetes.io/tls`: the Deployment's servers speak HTTPS with it."""
    expose: Literal["", "internal", "public"] = ""
    """On Kubernetes, the cloud's load balancer before the Deployment's servers, which is paid while it exists:
    `internal` for the cloud's own network, `public` for the internet. It passes TLS through, so that it needs
    `tls_secret`, and the token. Empty: pods of the cluster alone reach the servers."""
    clients: Namespaces = ()
    """Namespaces whose pods may connect to the servers and to the broker, beside those of `place.namespace` and the
    cluster's Prometheus. `["*"]`: everyone, such as a load balancer outside of the cluster."""
    service_account: str = Field(default="embark-serve", max_length=63, pattern=LABEL)
    """Kubernetes service account of the servers, which only read."""
    identity: str = Field(default="", max_length=256, pattern=IDENTITY)
    """Cloud identity of the servers, as `place.identity` is that of the others; it has to read the artifact, and
    nothing else. Empty: `place.identity`, where nothing trains."""
    memory_gib: PositiveFloat | None = None
    """Memory of a replica; default: the tables, the id maps and the process, as `embark plan --serve` counts them."""
    machine: str = Field(default="", max_length=100, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$|^$")
    """A machine without accelerators, such as `m7i.2xlarge`, on which alone replicas run; empty: on Kubernetes any node
    with room, of a managed endpoint the cheapest with room."""


class PublishSpec(Section):
    """`[publish]`: where versions of the model go while it trains, and the gate that a version must pass."""

    to: str = Field(default="", max_length=400)
    """A folder, or an `s3://`, `gs://` or `az://` URI; empty: `export` in the run's directory."""
    tables: Literal["fp32", "fp16", "int8", "int4"] = "fp32"
    """Type of the exported tables."""
    every_minutes: PositiveFloat = 10.0
    """Least time between versions; each is of the newest checkpoint then."""
    keep_versions: NonNegativeInt = 100
    """How many of the newest published versions to keep, with what they are deltas of; 0: all. What `embark export`
    wrote stays."""
    gate: bool = True
    """Measure each version on labelled rows, and publish it only where all bounds below hold."""
    data: str = ""
    """The rows: prepared data, or raw CSV, JSON Lines or Parquet files, such as those of the last hour, which are read
    for each version; empty: the run's held-out rows. A relative path goes by the spec's own folder; given with `--set`,
    by the current directory."""
    rows: PositiveInt = 200_000
    """How many of them, spread evenly."""
    slices: Names = ()
    """Features by whose values the bounds are tested; empty: all sparse features."""
    slice_values: PositiveInt = 50
    """Of each feature: the most frequent values, or as many ranges."""
    min_slice_rows: PositiveInt = 200
    """Slices with fewer rows are not tested."""
    false_alarm_rate: float = Field(default=0.005, gt=0, le=0.5)
    """Probability that chance alone refuses a good version, all tests together."""
    max_auc_drop: NonNegativeFloat = 0.005
    """How much lower than the published version's the AUC may be on the same rows."""
    max_loss_increase: NonNegativeFloat = 0.01
    """How much higher than the published version's the log loss may be on the same rows, as a share of it."""
    max_calibration_error: NonNegativeFloat = 0.1
    """How far the mean prediction may be from the mean label, as a share."""
    max_auc_shift: NonNegativeFloat = 0.05
    """How much lower the AUC may be than the published version's was when it was published, on the rows of then."""
    slice_factor: PositiveFloat = 5.0
    """How many times wider the first three bounds are for a slice."""
    max_psi: float = Field(default=0.25, ge=0.1)
    """How far the rows' columns, and the published version's scores by slice, may have moved since its publication
    (population stability index)."""


DeviceKind = Literal["auto", "cpu", "cuda"]
Precision = Literal["fp32", "tf32", "bf16"]


@frozen
class ScoringDevice:
    """The device that a model is served from, and how its dense layers are computed there."""

    kind: DeviceKind = "auto"  # `auto`: the GPU where there is one.
    precision: Precision = "tf32"  # Precision of dense layers on a GPU; on a CPU see `ExportedModel`.

    def __post_init__(self) -> None:
        for name, value, known in (("device", self.kind, get_args(DeviceKind)),
                                   ("precision", self.precision, get_args(Precision))):
            if value not in known:
                raise UserError(f"--{name} {value}: is none of {', '.join(known)}", f"leave out --{name}")
