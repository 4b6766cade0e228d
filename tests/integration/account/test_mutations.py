"""Faults in the guides' files that a real cloud refuses: its stand-in refuses them too, and names the cause.

mutations.toml was written from the guides and the clouds' documentation alone, without knowledge of the stand-ins, and
is not adapted to what they answer. `not_modelled` marks those which a stand-in lets pass or does not name, and why.
"""

from __future__ import annotations

import re
import shutil
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest
from integration.account.guide import copy_of_clone

from embark.__main__ import run
from embark.rehearse.account.session import AccountSession

pytestmark = pytest.mark.slow

MIN_REFUSED = 27
# The names that a user puts into run.toml.
NAMES = {
    "aws": ("store.root=s3://embark-123456789012/runs",
            "place.image=123456789012.dkr.ecr.us-west-2.amazonaws.com/embark:1"),
    "azure": ("place.storage_account=youraccount", "place.image=yourregistry.azurecr.io/embark:1"),
    "gcp": ("store.root=gs://your-project-embark/runs",
            "place.image=us-central1-docker.pkg.dev/your-project/embark/embark:1"),
}
# Until the launch script: the image in a registry, data in a bucket.
SETUP = {
    "aws": r"""
aws ecr create-repository --repository-name embark --region us-west-2
aws ecr get-login-password --region us-west-2 |
  docker login --username AWS --password-stdin 123456789012.dkr.ecr.us-west-2.amazonaws.com
IMAGE=123456789012.dkr.ecr.us-west-2.amazonaws.com/embark:1
docker build --tag $IMAGE . && docker push $IMAGE
./storage.sh buckets
embark data copy rows s3://embark-123456789012/data/criteo-1tb
""",
    "azure": r"""
az login
az group create --name embark --location eastus
az acr create --name yourregistry --resource-group embark --sku Premium
az acr login --name yourregistry
docker build --tag yourregistry.azurecr.io/embark:1 . && docker push yourregistry.azurecr.io/embark:1
./storage.sh buckets
AZURE_STORAGE_ACCOUNT_NAME=youraccount embark data copy rows az://embark-example/data/criteo-1tb
""",
    "gcp": r"""
gcloud components install gke-gcloud-auth-plugin kubectl alpha beta
gcloud auth login
gcloud auth application-default login
gcloud config set project "$PROJECT"
gcloud services enable artifactregistry.googleapis.com
gcloud artifacts repositories create embark --repository-format=docker --location=us-central1
gcloud auth configure-docker us-central1-docker.pkg.dev --quiet
IMAGE=us-central1-docker.pkg.dev/$PROJECT/embark/embark:1
docker build --tag $IMAGE . && docker push $IMAGE
./storage.sh buckets
embark data copy rows "gs://$PROJECT-embark/data/criteo-1tb"
""",
}
# Pods that cannot start are given up after two minutes of the account's clock.
ENVIRONMENT = """set -euo pipefail
export PROJECT=your-project START_LIMIT_S=120
"""


@dataclass(frozen=True)
class Edit:
    """Text of a file, replaced wherever it occurs there."""

    file: str
    old: str
    new: str

    def apply(self, folder: Path) -> None:
        path = folder / self.file
        text = path.read_text(encoding="utf-8")
        assert self.old in text, f"{self.file} has no {self.old!r} any more: write the mutation for what it has now"
        path.write_text(text.replace(self.old, self.new), encoding="utf-8")


@dataclass(frozen=True)
class Mutation:
    """A fault, and what a good message about it says."""

    cloud: str
    name: str
    why: str
    source: str
    cause: str
    edit: tuple[Edit, ...]
    run: str = ""
    not_modelled: str = ""  # Why the stand-in lets it pass, or does not name the cause.

    @classmethod
    def read(cls, row: Mapping[str, Any]) -> Mutation:
        return cls(**{**row, "edit": tuple(Edit(**one) for one in row["edit"])})


MUTATIONS: Sequence[Mutation] = [
    Mutation.read(row)
    for row in tomllib.loads(Path(__file__).with_name("mutations.toml").read_text(encoding="utf-8"))["mutation"]]


def launch(cloud: str) -> str:
    return f"./train_dlrm_{cloud}.sh --yes"


@pytest.fixture(scope="module")
def rendered(tmp_path_factory) -> Callable[[str], Path]:
    """A cloud's folder with a user's names in it."""
    clone = copy_of_clone(tmp_path_factory.mktemp("clone"))

    @cache
    def folder(cloud: str) -> Path:
        found = clone / "examples" / "cloud_deployment" / cloud
        words = [word for name in NAMES[cloud] for word in ("--set", name)]
        assert run(["render", str(found / "run.toml"), *words]) == 0
        (found / "rows").mkdir()
        (found / "rows" / "part-0.bin").write_bytes(bytes(64))
        return found

    return folder


def run_in_fresh_account(source: Path, edits: Sequence[Edit], command: str, folder: Path) -> CompletedProcess[str]:
    """Set up as a user does, edit the rendered files, and run the command."""
    cloud, example = source.name, folder / "folder"
    shutil.copytree(source, example)
    (folder / "account").mkdir()
    with AccountSession(cloud, folder / "account") as session:
        setup = session.bash(ENVIRONMENT + SETUP[cloud], example)
        assert setup.returncode == 0, setup.stdout[-4000:]
        for edit in edits:
            edit.apply(example)
        done = session.bash(ENVIRONMENT + command, example)
    shutil.rmtree(folder, ignore_errors=True)
    return done


def messages(output: str) -> str:
    """Without the commands that scripts echo, which repeat every misspelt name."""
    return "".join(line for line in output.splitlines(keepends=True) if not line.startswith("+ "))


def is_refused(mutation: Mutation, done: CompletedProcess[str]) -> bool:
    return done.returncode != 0 and re.search(mutation.cause, messages(done.stdout)) is not None


@pytest.mark.parametrize("cloud", sorted(SETUP))
def test_without_a_mutation_the_run_trains(cloud, rendered, tmp_path):
    done = run_in_fresh_account(rendered(cloud), (), launch(cloud), tmp_path)
    assert done.returncode == 0, done.stdout[-6000:]


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda one: f"{one.cloud}: {one.name}")
def test_a_mutation_is_refused_with_its_cause(mutation, rendered, tmp_path):
    command = mutation.run or launch(mutation.cloud)
    done = run_in_fresh_account(rendered(mutation.cloud), mutation.edit, command, tmp_path)
    shown = messages(done.stdout)[-6000:]
    if mutation.not_modelled:
        assert not is_refused(mutation, done), f"it is refused now: remove not_modelled\n{shown}"
    else:
        assert done.returncode != 0, f"it passed, but: {mutation.why} ({mutation.source})\n{shown}"
        assert re.search(mutation.cause, messages(done.stdout)), f"no message matches {mutation.cause}\n{shown}"


def test_nearly_all_mutations_are_refused():
    assert {cloud: sum(one.cloud == cloud for one in MUTATIONS) for cloud in SETUP} == dict.fromkeys(SETUP, 10)
    assert len({(one.cloud, one.name) for one in MUTATIONS}) == len(MUTATIONS)
    let_pass = [f"{one.cloud}: {one.name} ({one.not_modelled})" for one in MUTATIONS if one.not_modelled]
    assert len(MUTATIONS) - len(let_pass) >= MIN_REFUSED, let_pass
