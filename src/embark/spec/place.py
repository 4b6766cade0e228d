"""`[place]`: where the run executes, locally or in a cloud."""

from typing import Annotated, Literal, get_args

from pydantic import Field, PositiveFloat

from .section import Many, NonNegativeInt, PositiveInt, Section

PodTarget = Literal["job", "jobset", "trainjob", "pytorchjob", "ray", "torchx"]
ServeTarget = Literal["serve", "kserve", "cloud-run", "vertex-endpoint", "sagemaker", "azureml"]
Target = Literal[PodTarget, "slurm", "vertex", "vm", "tpu-vm", "follow", ServeTarget]

LABEL = r"^[a-z]([a-z0-9-]*[a-z0-9])?$"
"""A DNS label, as Kubernetes takes it for a name."""
_IMAGE = (
    r"^$|^[a-z0-9]+([.-][a-z0-9]+)*(:[0-9]{1,5})?(/[a-z0-9]+([._-]+[a-z0-9]+)*)*"
    r"(:[A-Za-z0-9_][A-Za-z0-9._-]{0,127})?(@sha256:[0-9a-f]{64})?$"
)
_FILE = r"^[A-Za-z0-9_][A-Za-z0-9._-]*(/[A-Za-z0-9_][A-Za-z0-9._-]*)*$"
IDENTITY = r"^[A-Za-z0-9][A-Za-z0-9:/@._+=,-]*$|^$"
Paths = Many[Annotated[str, Field(max_length=200, pattern=_FILE)]]

_KEY = r"([a-z0-9A-Z][a-zA-Z0-9._-]*/)?[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?"
_VALUE = r"([A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?)?"
_QUANTITY = r"[0-9]+(\.[0-9]+)?(m|[kMGTPE]|[KMGTPE]i)?"
Labels = Many[Annotated[str, Field(max_length=400, pattern=f"^{_KEY}={_VALUE}$")]]
Taints = Many[Annotated[str, Field(
    max_length=400, pattern=f"^{_KEY}(={_VALUE})?:(NoSchedule|NoExecute|PreferNoSchedule)$")]]
Amounts = Many[Annotated[str, Field(max_length=400, pattern=f"^{_KEY}={_QUANTITY}$")]]

CLUSTER_TARGETS: tuple[Target, ...] = (*get_args(PodTarget), "follow", "serve", "kserve")
"""Targets whose pods run in a Kubernetes cluster."""
EXISTING_FIELDS = ("node_selector", "tolerations", "resources", "claim", "storage_class", "pull_secret")
"""Fields that describe how a cluster that exists differs from one that Embark creates."""

ELASTIC_TARGETS: tuple[Target, ...] = ("job", "pytorchjob", "vm")
"""Targets that go on with fewer machines, and take a machine back: torchrun keeps the rendezvous open, and the
controller waits for no machine that is missing at the end."""

Nodes = Annotated[int, Field(gt=0, le=100_000)]
SlurmName = Annotated[str, Field(max_length=200, pattern=r"^[A-Za-z0-9._,:&|()\[\]*+@/-]*$")]
"""A word of Slurm's own: a partition, or several with commas; an expression of features."""
_FOLDER = r"^(/[A-Za-z0-9._-]+)+$"
_PRINTABLE = r"[^\x00-\x1f\x7f]*$"


class NodeRange(Section):
    """An elastic number of machines: torchrun continues with those it has, and takes others in."""

    min: Nodes
    """The run trains while at least this many machines are up. The tables must fit their memory."""
    max: Nodes
    """So many machines are created, planned and priced."""


class SlurmSpec(Section):
    """`[place.slurm]`: what a cluster that Slurm manages is asked for, with `place.target = "slurm"`."""

    partition: SlurmName = ""
    """The partition, or several with commas; empty: the cluster's default."""
    account: SlurmName = ""
    """The account that is charged; empty: your default."""
    qos: SlurmName = ""
    """The quality of service; empty: the default."""
    constraint: SlurmName = ""
    """Features that the nodes must have, such as `h100&ib`."""
    options: Many[Annotated[str, Field(pattern=f"^--[a-z]{_PRINTABLE}")]] = ()
    """Further options of `sbatch`, such as `--time=1-00:00:00` or `--reservation=NAME`."""
    gpus_per_node: NonNegativeInt | None = None
    """GPUs of each node, with a rank for each; default: those of `place.machine`, else none and one rank."""
    cpus_per_node: PositiveInt | None = None
    """Processors of each node; empty: whole nodes, which no other job shares."""
    memory_gib: PositiveInt | None = None
    """Memory of each node; empty: all of a whole node, else the partition's default."""
    usd_per_node_hour: PositiveFloat | None = None
    """The price of a node, by which `place.budget_usd` is kept; default: the catalog's of `place.machine`."""
    container: Literal["", "pyxis", "apptainer"] = ""
    """What runs `place.image`: Pyxis with Enroot, or Apptainer. Empty: no container, the Python of `venv`."""
    image_file: str = Field(default="", pattern=rf"{_FOLDER}|^$")
    """An image as a file that every node sees (`.sqsh` of Enroot, `.sif` of Apptainer), instead of `place.image`."""
    mounts: Many[Annotated[str, Field(pattern=_FOLDER)]] = ()
    """Folders of the nodes that the container sees under the same path, besides the directory of the submission."""
    venv: str = Field(default="", pattern=rf"{_FOLDER}|^$")
    """A virtual environment with Embark that every node sees; empty: the `python` of PATH after `setup`."""
    setup: Many[Annotated[str, Field(pattern=f"^{_PRINTABLE}")]] = ()
    """Shell lines that every attempt begins with, such as `module load cuda`."""


class PlaceSpec(Section):
    """`[place]`: where the run executes."""

    device: Literal["auto", "cpu", "cuda", "jax", "tpu"] = "auto"
    """`auto`: a GPU if there is one, else the CPU; a TPU if `machine` is one. `tpu`: the JAX trainer on TPUs. `jax`:
    the JAX trainer on any device JAX finds."""
    timeout_s: PositiveInt = 600
    """Timeout of collectives: how long a rank waits for the others."""
    grace_s: PositiveFloat | None = None
    """Seconds between a preemption notice and termination; default `EMBARK_GRACE_S`, or the cloud's own."""
    watch_notices: bool = True
    """On AWS, Azure and Google Cloud, poll the metadata server for preemption notices."""
    cloud: Literal["", "aws", "azure", "gcp"] = ""
    """The cloud; follows from `machine` if that is given."""
    machine: str = Field(default="", max_length=100)
    """A machine type from `embark catalog list`, such as `p5.48xlarge`, with one rank per accelerator; in an existing
    cluster also a number of its accelerators, such as `8xH100`. Empty: this machine."""
    nodes: Nodes | NodeRange = 1
    """Number of machines, or `{min = 2, max = 3}`: the run continues with the machines that are up, from its last
    checkpoint. With `target` `job`, `pytorchjob` or `vm`."""
    region: str = Field(default="", pattern=r"^[a-z0-9][a-z0-9-]*$|^$", max_length=40)
    """The region; empty: that of `zone`, or the cheapest that offers the machine."""
    zone: str = Field(default="", pattern=r"^[A-Za-z0-9][A-Za-z0-9-]*$|^$", max_length=40)
    """The zone, if one must be named; empty: the region's first that sells the machine."""
    spot: bool = False
    """Use spot (preemptible) machines."""
    capacity: Literal["", "on-demand", "reserved", "block", "flex-start"] = ""
    """How machines that are not on spot are bought. `reserved` and `block` use those of `reservation`, which is paid
    whether they run or not: an AWS capacity reservation or Capacity Block, a reservation or a block of Google Cloud, an
    Azure capacity reservation group. `flex-start`, on Google Cloud: the run waits, unpaid, until all its machines can
    be had, and has them for at most 7 days. Empty: on demand, or flex-start if Google sells the machine only so."""
    reservation: str = Field(default="", max_length=300, pattern=r"^[A-Za-z0-9/][A-Za-z0-9/._()-]*$|^$")
    """What `capacity = "reserved"` or `"block"` uses: `cr-0123456789abcdef0` on AWS, the reservation's name on Google
    Cloud (`projects/PROJECT/reservations/NAME` if another project shares it), the group's resource id on Azure."""
    target: Target = "job"
    """What starts the processes: a Kubernetes `job`, `jobset`, Kubeflow's `trainjob` or `pytorchjob`, `ray`, `torchx`,
    `vertex`, a cluster of `slurm`, or plain machines (`vm`, `tpu-vm`). `follow`: a trainer that follows `[stream]`,
    its publisher, servers and broker on Kubernetes. The others train nothing: they deploy an
    exported model as `[serve]` says, on Kubernetes (`serve`, `kserve`) or as a managed endpoint (`cloud-run`,
    `vertex-endpoint`, `sagemaker`, `azureml`)."""
    render_targets: Many[PodTarget] = ()
    """Kubernetes targets whose files `embark render` writes besides those of `target`, into the same folder. They need
    the same cluster, so they have no effect if `target` is not one of them."""
    cluster: Literal["create", "existing"] = "create"
    """`create`: also render the scripts that create the Kubernetes cluster, storage, budget alerts and alarms.
    `existing`: the pods run in the cluster that kubectl is set to, and nothing is created beside them; `embark doctor
    --cloud` checks what it must have (docs/guides/existing-cluster.md)."""
    node_selector: Labels = ()
    """Existing cluster: labels of the run's nodes, such as `["pool=h100"]`, in place of the machine's own label."""
    tolerations: Taints = ()
    """Existing cluster: further taints of these nodes, as kubectl writes them: `["team=ads:NoSchedule"]`."""
    resources: Amounts = ()
    """Existing cluster: what each pod asks for besides accelerators, or instead of the catalog's numbers, such as
    `["rdma/ib=8", "cpu=96", "memory=900Gi"]`."""
    claim: str = Field(default="", max_length=253, pattern=rf"{LABEL}|^$")
    """Existing cluster: a PersistentVolumeClaim of the namespace to mount at `volume_path`."""
    storage_class: str = Field(default="", max_length=253, pattern=r"^[a-z0-9]([a-z0-9.-]*[a-z0-9])?$|^$")
    """Existing cluster: the StorageClass of the broker's disk in a deployment that follows a stream; empty: the
    cluster's default."""
    pull_secret: str = Field(default="", max_length=253, pattern=r"^[a-z0-9]([a-z0-9.-]*[a-z0-9])?$|^$")
    """Existing cluster: a Secret of the namespace by which nodes pull the image; empty: they may by themselves, or the
    service account names one."""
    image: str = Field(default="", max_length=400, pattern=_IMAGE)
    """The container image, preferably with its digest: `embark image` builds it, pushes it and writes its name here.
    Empty: the name under which the rendered commands build it."""
    image_files: Paths = ()
    """Files and folders beside the rendered `Dockerfile` that it copies to where the container starts, such as a script
    of your own."""
    namespace: str = Field(default="embark", max_length=63, pattern=LABEL)
    """Kubernetes namespace of the run's objects."""
    service_account: str = Field(default="embark", max_length=63, pattern=LABEL)
    """Kubernetes service account of the pods."""
    identity: str = Field(default="", max_length=256, pattern=IDENTITY)
    """Cloud identity of the pods: the ARN of an IAM role, the client id of an Azure managed identity, or the email of a
    Google service account. Empty: what EKS Pod Identity or the machines grant."""
    account: str = Field(default="", max_length=100, pattern=r"^[a-z0-9][a-z0-9:.-]*$|^$")
    """The AWS account, Azure subscription or Google Cloud project that is billed."""
    storage_account: str = Field(default="", pattern=r"^[a-z0-9]{3,24}$|^$")
    """Azure storage account that holds the containers of `az://…`."""
    queue: str = Field(default="", max_length=63, pattern=rf"{LABEL}|^$")
    """A Kueue local queue, for gang scheduling; on a cluster that Embark makes its name continues with the kind of
    machine, such as `embark-p4d-24xlarge`. Empty: pods start one by one."""
    volume: str = Field(default="", max_length=60, pattern=r"^[a-z0-9][a-z0-9-]*$|^$")
    """A file system from `embark catalog list --volumes` to mount at `volume_path`, with or without an object store."""
    volume_path: str = Field(default="/mnt/data", max_length=200, pattern=r"^(/[A-Za-z0-9._-]+)+$")
    """Mount path in the container."""
    max_hours: PositiveFloat | None = None
    """Terminate the run after this many hours."""
    budget_usd: PositiveFloat | None = None
    """Budget for the run's machines: before exceeding it, the run saves and ends, and is not restarted."""
    slurm: SlurmSpec = SlurmSpec()

    omitted = ("slurm",)

    @property
    def is_existing(self) -> bool:
        """Whether the pods run in a cluster that someone else made."""
        return self.cluster == "existing"

    @property
    def max_nodes(self) -> int:
        """Machines that are created, planned and priced."""
        return self.nodes.max if isinstance(self.nodes, NodeRange) else self.nodes

    @property
    def min_nodes(self) -> int:
        """Machines that the run needs, and whose memory it must fit."""
        return self.nodes.min if isinstance(self.nodes, NodeRange) else self.nodes

    @property
    def node_counts(self) -> range:
        """Every number of machines on which the run may train."""
        return range(self.min_nodes, self.max_nodes + 1)

    @property
    def is_elastic(self) -> bool:
        return self.min_nodes < self.max_nodes
