"""A stand-in of Google Cloud: gcloud and gsutil answer from one project that remembers what exists."""

from pathlib import Path

from cloudsim.account import Account
from cloudsim.gcp import object_store
from cloudsim.gcp.gcloud import Gcloud, Gsutil
from cloudsim.gcp.project import Project
from cloudsim.gcp.registry import ArtifactRegistry
from cloudsim.programs import add_common_programs

PROJECT = "your-project"
NOT_MODELLED = (
    "Google Cloud: the person is the project's owner; organization policies are not checked",
    "Google Cloud: capacity is always there; GPU zones are those of facts.toml, prices and quotas those of the catalog",
    "GKE: networking between pods, the CSI drivers' own pods, upgrades and repairs",
    "Vertex AI: worker pools with different containers run the first pool's",
    "TPU VMs: the hosts of a slice train as one process of JAX on this machine's CPU",
    "Machines: what cloud-init and startup scripts call (apt-get, pip, mdadm) is recorded, not run",
    "IAM: roles take effect at once",
)


def open_account(folder: Path, project: str = PROJECT) -> Account:
    """An empty project with billing, and its owner logged in."""
    folder.mkdir(parents=True, exist_ok=True)
    account = Account("gcp", folder)
    own = Project(account, project)
    gcloud = Gcloud(own)
    account.registry = ArtifactRegistry(own)
    account.add_programs([gcloud, Gsutil(gcloud)])
    add_common_programs(account)
    account.not_modelled += NOT_MODELLED
    object_store.start(account)
    return account


def project_of(account: Account) -> Project:
    """The project behind an account's gcloud: for quotas and roles that a test sets."""
    gcloud = account.programs["gcloud"]
    assert isinstance(gcloud, Gcloud)
    return gcloud.project
