"""`[place]`: what it runs on, here or in a cloud."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, PositiveFloat, PositiveInt

from embark.spec.section import Section

Target = Literal[
    "job", "jobset", "trainjob", "pytorchjob", "ray", "torchx", "vertex", "vm", "tpu-vm", "compose",
]

_LABEL = r"^[a-z]([a-z0-9-]*[a-z0-9])?$"
"""A DNS label, as Kubernetes takes it for a name."""
_IMAGE = (
    r"^$|^[a-z0-9]+([.-][a-z0-9]+)*(:[0-9]{1,5})?(/[a-z0-9]+([._-]+[a-z0-9]+)*)*"
    r"(:[A-Za-z0-9_][A-Za-z0-9._-]{0,127})?(@sha256:[0-9a-f]{64})?$"
)


class PlaceSpec(Section):
    """What it runs on."""

    device: Literal["auto", "cpu", "cuda", "jax", "tpu"] = "auto"
    """`auto`: a GPU where there is one, else the CPU; where `machine` is a TPU, that. `tpu`: the trainer in JAX, on
    TPUs. `jax`: the same on whatever JAX finds."""
    timeout_s: PositiveInt = 600
    """How long a rank waits for the others before it gives up."""
    grace_s: PositiveFloat | None = None
    """Seconds from the notice to the end when the machine is taken away; else `EMBARK_GRACE_S`, or the cloud's own."""
    watch_notices: bool = True
    """On AWS, Azure and Google Cloud, ask the machine whether it is about to be taken away."""
    cloud: Literal["", "aws", "azure", "gcp"] = ""
    """Whose machines; follows from `machine` where that is given."""
    machine: str = Field(default="", max_length=100)
    """A machine of `embark catalog list`, such as `p5.48xlarge`; its accelerators are the ranks. Empty: this one."""
    nodes: PositiveInt = 1
    """How many of them."""
    region: str = Field(default="", pattern=r"^[a-z0-9][a-z0-9-]*$|^$", max_length=40)
    """The cloud's region; empty: the cheapest that has the machine."""
    zone: str = Field(default="", pattern=r"^[A-Za-z0-9][A-Za-z0-9-]*$|^$", max_length=40)
    """The zone in it, where one must be named; empty: the region's first."""
    spot: bool = False
    """Take machines that the cloud may take back, at its lower price."""
    target: Target = "job"
    """Who starts the processes: a Kubernetes `job`, `jobset`, Kubeflow's `trainjob` or `pytorchjob`, `ray`, `torchx`,
    `vertex`, plain machines (`vm`, `tpu-vm`), or `compose` on one host."""
    image: str = Field(default="", max_length=400, pattern=_IMAGE)
    """The container image, best with its digest: the `Dockerfile` that is rendered, built and pushed to your registry.
    Empty: the name that the rendered commands build it under."""
    namespace: str = Field(default="embark", max_length=63, pattern=_LABEL)
    """Of Kubernetes, for all of the run's objects."""
    service_account: str = Field(default="embark", max_length=63, pattern=_LABEL)
    """Of Kubernetes: who the pods are."""
    identity: str = Field(default="", max_length=256, pattern=r"^[A-Za-z0-9][A-Za-z0-9:/@._+=,-]*$|^$")
    """Who the pods are to the cloud: the ARN of an IAM role, the client id of an Azure managed identity, or the email
    of a Google service account. Empty: what EKS Pod Identity or the machines themselves grant."""
    account: str = Field(default="", max_length=100, pattern=r"^[a-z0-9][a-z0-9:.-]*$|^$")
    """The AWS account, the Azure subscription or the Google Cloud project that pays."""
    storage_account: str = Field(default="", pattern=r"^[a-z0-9]{3,24}$|^$")
    """Of Azure: the one that holds the containers which `az://…` names."""
    queue: str = Field(default="", max_length=63, pattern=rf"{_LABEL}|^$")
    """A Kueue queue: the pods start all together or not at all. Empty: as they come."""
    volume: str = Field(default="", max_length=60, pattern=r"^[a-z0-9][a-z0-9-]*$|^$")
    """A file system of `embark catalog volumes` to mount at `volume_path`, besides or instead of an object store."""
    volume_path: str = Field(default="/mnt/data", max_length=200, pattern=r"^(/[A-Za-z0-9._-]+)+$")
    """Where it is seen in the container."""
    max_hours: PositiveFloat | None = None
    """Give up after so many hours, finished or not."""
    budget_usd: PositiveFloat | None = None
    """What the run's machines may cost in all: before it would pass that, it saves, ends and is not started again."""
