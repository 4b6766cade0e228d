"""A Google Cloud project: gcloud and gsutil answer from one state."""

from pathlib import Path

from cloudsim.account import Account
from cloudsim.gcp import object_store
from cloudsim.gcp.gcloud import Gcloud, Gsutil
from cloudsim.gcp.project import Project
from cloudsim.gcp.registry import ArtifactRegistry
from cloudsim.programs import add_common_programs

PROJECT = "your-project"
NOT_MODELLED = (
    "Google Cloud: permissions of the user, who owns the project, and policies of an organization",
    "Google Cloud: capacity of a zone; zones with GPUs are those of facts.toml, quotas those of the catalog",
    "Google Cloud: networking between pods of GKE, pods of CSI drivers, upgrades and repairs",
    "Google Cloud: different containers in the worker pools of Vertex AI; all run the first pool's",
    "Google Cloud: the hosts of a TPU slice, which train as one JAX process on this machine's CPU",
    "Google Cloud: programs that cloud-init and startup scripts call (apt-get, pip, mdadm), which do nothing",
    "Google Cloud: the time until a role is effective; here it is at once",
)


def open_account(folder: Path, project: str = PROJECT) -> Account:
    """Open an empty project with billing whose owner is logged in."""
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
    """Return the project behind an account's gcloud, so that a test can set its quotas and roles."""
    gcloud = account.programs["gcloud"]
    assert isinstance(gcloud, Gcloud)
    return gcloud.project
