"""Faults in the guides' files that a real cloud refuses: its stand-in refuses them too, and the headline is the cause.

The thirty of mutations.toml were written from the guides and the clouds' documentation alone, without knowledge of the
stand-ins, and are not adapted to what they answer. `not_modelled` marks those which a stand-in lets pass or does not
name, and why.

A cloud's account is set up once and goes through the stages of the launch script; each mutation runs in a fork of the
last stage that uses none of its files, which are put back afterwards. No pod trains: what reaches the training was not
refused. The guides' tests train.
"""

from __future__ import annotations

import os
import pickle
import re
import shutil
import threading
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from socketserver import BaseServer
from typing import Any

import pytest
from account_shell import ScriptResult, run_shell
from integration.account.guide import copy_of_clone

from cloudsim.account import Account
from cloudsim.aws import account as aws_account
from cloudsim.azure.blob_server import serve_blobs
from cloudsim.azure.program import Az
from cloudsim.gcp import object_store, training
from cloudsim.kubernetes import programs
from cloudsim.server import open_account
from embark.__main__ import run

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
SOURCES = {"gcp": "gs://your-project-embark/data/criteo-1tb"}
# Further folders that the guide renders.
TARGETS = {
    "gcp": {
        "vm": ("place.target=vm",),
        "vertex": ("place.target=vertex", "place.account=your-project"),
        "tpu": ("place.target=tpu-vm", "place.machine=v5e-16", "place.nodes=1"),
    },
}
# Commands before the launch script: the image in a registry, data in a bucket.
SETUP = {
    "aws": r"""
aws ecr create-repository --repository-name embark --region us-west-2
aws ecr get-login-password --region us-west-2 |
  docker login --username AWS --password-stdin 123456789012.dkr.ecr.us-west-2.amazonaws.com
IMAGE=123456789012.dkr.ecr.us-west-2.amazonaws.com/embark:1
docker build --tag $IMAGE . && docker push $IMAGE
./storage.sh buckets
embark data copy rows s3://embark-123456789012/data/criteo-1tb
# These let the CLI and moto read their models once, before the forks.
aws ec2 describe-vpcs --region us-west-2
aws eks list-clusters --region us-west-2
aws fsx describe-file-systems --region us-west-2
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
# Pods that cannot start, or are not admitted, are given up after two minutes of the account's clock.
ENVIRONMENT = """set -euo pipefail
export PROJECT=your-project START_LIMIT_S=120 QUEUE_LIMIT_S=120
"""
# The commands of the launch script that lead to each stage, and the stage after which a file is used first.
STAGES = {cloud: ("", f"./{name}_cluster.sh up", "./storage.sh volume")
          for cloud, name in (("aws", "eks"), ("azure", "aks"), ("gcp", "gke"))}
FIRST_USED = {"storage.sh": 1, "volume.yaml": 1, "claim.yaml": 1,
              "kueue.yaml": 2, "data_copy_job.yaml": 2, "kubernetes_job.yaml": 2}


@dataclass(frozen=True)
class Edit:
    """A replacement of text in a file, wherever it occurs."""

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
    """A fault, and the pattern of a good message about it."""

    cloud: str
    name: str
    cause: str
    why: str = ""
    source: str = ""
    edit: tuple[Edit, ...] = ()  # Empty if the commands are the fault.
    run: str = ""
    stage: int = 0
    not_modelled: str = ""  # Why the stand-in accepts it or does not name the cause.

    @classmethod
    def read(cls, row: Mapping[str, Any]) -> Mutation:
        edits = tuple(Edit(**one) for one in row.get("edit", ()))
        launch = {"run": f"./train_dlrm_{row['cloud']}.sh --yes",
                  "stage": min((FIRST_USED.get(one.file, 0) for one in edits), default=0)}
        return cls(**{**({} if "run" in row else launch), **row, "edit": edits})


FILE = tomllib.loads(Path(__file__).with_name("mutations.toml").read_text(encoding="utf-8"))
THIRTY: Sequence[Mutation] = [Mutation.read(row) for row in FILE["mutation"]]
MORE: Sequence[Mutation] = [Mutation.read(row) for row in FILE["more"]]


def render_with_names(cloud: str, clone: Path) -> Path:
    """Render a cloud's folder with a user's names."""
    folder = copy_of_clone(clone) / "examples" / "cloud_deployment" / cloud
    assert run(["render", str(folder / "run.toml"), *_sets(NAMES[cloud])]) == 0
    for target, sets in TARGETS.get(cloud, {}).items():
        data = f"data.path={SOURCES[cloud]}"
        assert run(["render", str(folder / "run.toml"), *_sets((*sets, "place.volume=", data)),
                    "--out", str(folder / target)]) == 0
    (folder / "rows").mkdir()
    (folder / "rows" / "part-0.bin").write_bytes(bytes(64))
    return folder


def _sets(settings: Sequence[str]) -> list[str]:
    return [word for setting in settings for word in ("--set", setting)]


class Moto:
    """moto's server, which a fork continues at the same address, so that clients and applications stay valid."""

    def __init__(self) -> None:
        from moto import settings
        from moto.moto_server.werkzeug_app import DomainDispatcherApplication, MotoRequestHandler, create_backend_app
        from werkzeug.serving import make_server

        settings.ec2_load_default_amis = lambda: False
        application = DomainDispatcherApplication(create_backend_app)
        self._server = make_server("127.0.0.1", 0, application, True, request_handler=MotoRequestHandler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def start(self) -> None:
        # werkzeug's own would close the socket at its end.
        threading.Thread(target=BaseServer.serve_forever, args=(self._server, 0.01), daemon=True).start()

    def stop(self) -> None:
        self._server.shutdown()


class Forks:
    """An account and a rendered folder below `root`; every run gets a copy of them."""

    def __init__(self, account: Account, folder: Path, root: Path, saved: Path, moto: Moto | None) -> None:
        self.account, self.folder, self.root, self.saved, self.moto = account, folder, root, saved, moto

    def advance(self, text: str) -> None:
        """Run commands that all later forks start from."""
        done = run_shell(self.account, ENVIRONMENT + text, self.folder)
        assert done.code == 0, done.output[-4000:]
        shutil.rmtree(self.saved, ignore_errors=True)
        shutil.copytree(self.root, self.saved)

    def run(self, edits: Sequence[Edit], command: str) -> ScriptResult:
        for edit in edits:
            edit.apply(self.folder)
        reader, writer = os.pipe()
        if self.moto:
            self.moto.stop()
        process = os.fork()
        if process == 0:
            try:
                self._serve_again()
                _train_nothing()
                done = run_shell(self.account, ENVIRONMENT + command, self.folder)
                with open(writer, "wb") as file:
                    pickle.dump(done, file)
            finally:
                os._exit(0)
        os.close(writer)
        with open(reader, "rb") as file:
            answer = file.read()
        os.waitpid(process, 0)
        if self.moto:
            self.moto.start()
        shutil.rmtree(self.root)
        shutil.copytree(self.saved, self.root)
        assert answer, f"the fork died: {command}"
        done = pickle.loads(answer)
        assert isinstance(done, ScriptResult)
        return done

    def _serve_again(self) -> None:
        """Start the object stores again, because a fork has no threads; all but moto's get another address."""
        account = self.account
        if self.moto:
            self.moto.start()
        elif account.cloud == "azure":
            az = account.programs["az"]
            assert isinstance(az, Az)
            account.environment["AZURITE_BLOB_STORAGE_URL"] = serve_blobs(az.subscription)
        else:
            object_store.start(account)


def _train_nothing() -> None:
    programs._train = lambda cluster, job: programs.Outcome(True, "")
    training.train = lambda name, commands, env, spec: programs.Outcome(
        True, "", logs={str(index): "" for index in range(len(commands))})


def trouble_with(mutation: Mutation, done: ScriptResult) -> str:
    is_refused = done.code != 0 and re.search(mutation.cause, done.headline) is not None
    if is_refused is not bool(mutation.not_modelled):
        return ""
    why = ("it is refused now: remove not_modelled" if is_refused
           else f"it passed, but: {mutation.why} ({mutation.source})" if done.code == 0
           else f"the headline does not match {mutation.cause}: {done.headline}")
    return f"=== {mutation.cloud}: {mutation.name}: {why}\n{done.output[-3000:]}"


@pytest.mark.parametrize("cloud", sorted(SETUP))
def test_every_mutation_is_refused_with_its_cause(cloud, tmp_path, monkeypatch):
    moto = None
    if cloud == "aws":
        moto = Moto()
        moto.start()
        monkeypatch.setattr(aws_account, "_moto_endpoint", lambda: moto.url)
    root = tmp_path / "a"
    folder = render_with_names(cloud, root / "clone")
    (root / "account").mkdir()
    account = open_account(cloud, root / "account")
    if isinstance(account, aws_account.AwsAccount):
        for service in ("ec2", "eks"):  # The account caches them: each reads its service's model.
            account.client(service, "us-west-2")
    forks = Forks(account, folder, root, tmp_path / "saved", moto)
    own = [one for one in (*THIRTY, *MORE) if one.cloud == cloud]
    troubles: list[str] = []
    try:
        forks.advance(SETUP[cloud])
        for stage, commands in enumerate(STAGES[cloud]):
            if commands:
                forks.advance(commands)
            here = sorted((one for one in own if one.stage == stage), key=lambda one: one.run)
            for command, group in groupby(here, key=lambda one: one.run):
                mutations = list(group)
                if any(one.edit for one in mutations):
                    done = forks.run((), command)
                    assert done.code == 0, f"refused without a mutation: {command}\n{done.output[-6000:]}"
                troubles += [trouble_with(one, forks.run(one.edit, command)) for one in mutations]
    finally:
        account.close()
    assert not any(troubles), "\n".join(filter(None, troubles))


def test_nearly_all_mutations_are_refused():
    assert {cloud: sum(one.cloud == cloud for one in THIRTY) for cloud in SETUP} == dict.fromkeys(SETUP, 10)
    assert len({(one.cloud, one.name) for one in (*THIRTY, *MORE)}) == len(THIRTY) + len(MORE)
    let_pass = [f"{one.cloud}: {one.name} ({one.not_modelled})" for one in THIRTY if one.not_modelled]
    assert len(THIRTY) - len(let_pass) >= MIN_REFUSED, let_pass
