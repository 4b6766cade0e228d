"""A Google Cloud project: gcloud and gsutil answer from one state."""

from pathlib import Path

from cloudsim.account import Account
from cloudsim.gcp import object_store
from cloudsim.gcp.gcloud import Gcloud, Gsutil
from cloudsim.gcp.project import Project
from cloudsim.gcp.registry import ArtifactRegistry
from cloudsim.programs import add_common_programs

PROJECT = "your-project"


def open_account(folder: Path, project: str = PROJECT) -> Account:
    """Open an empty project with billing whose owner is logged in."""
    folder.mkdir(parents=True, exist_ok=True)
    account = Account("gcp", folder)
    own = Project(account, project)
    gcloud = Gcloud(own)
    account.registry = ArtifactRegistry(own)
    account.add_programs([gcloud, Gsutil(gcloud)])
    add_common_programs(account)
    object_store.start(account)
    return account


def project_of(account: Account) -> Project:
    """Return the project behind an account's gcloud, so that a test can set its quotas and roles."""
    gcloud = account.programs["gcloud"]
    assert isinstance(gcloud, Gcloud)
    return gcloud.project
