"""The first start of a machine by its cloud-init file or startup script, and the rights of its service account."""

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from cloudsim.account import Call
from cloudsim.gcp import object_store, training
from cloudsim.gcp.project import Invocation, Project
from cloudsim.gcp.registry import pull_error
from cloudsim.machine import CLOUD_CONFIG, FunctionProgram, MachineDocker, first_start
from cloudsim.state import Refusal, Resource
from embark.spec.load import parse_spec
from embark.values import frozen


@frozen
class Service:
    """The program that a machine runs after its first start, or why it runs none."""

    words: tuple[str, ...]
    spec: str
    trouble: str = ""


def boot(project: Project, name: str, metadata: Mapping[str, str], service_account: str,
         scopes: Sequence[str]) -> Service:
    """Run what the machine is given for its first start."""
    text = metadata.get("user-data") or metadata.get("startup-script") or ""
    if not text:
        return Service((), "", "the machine has no user-data and no startup-script: nothing runs on it")
    if "user-data" in metadata and not text.startswith(CLOUD_CONFIG):
        return Service((), "", "cloud-init: user-data does not begin with #cloud-config and is ignored")
    rights = _Rights(project, service_account, scopes)
    docker = MachineDocker(rights)
    start = first_start(text, docker, [FunctionProgram("gcloud", lambda call: rights.gcloud(call, docker))], name)
    return Service(start.words, start.spec, start.trouble)


@frozen
class _Rights:
    """The rights that a machine has by its service account."""

    project: Project
    account: str
    scopes: Sequence[str]

    def login_error(self, host: str, user: str, password: str) -> str:
        return ""

    def pull_error(self, image: str, logins: set[str]) -> str:
        host = image.partition("/")[0]
        if host.endswith("-docker.pkg.dev") and host not in logins:
            return (f'Head "https://{host}/v2/": denied: Unauthenticated request. Unauthenticated requests do not have '
                    'permission "artifactregistry.repositories.downloadArtifacts" (or it may not exist)')
        return pull_error(self.project, image, self.account)

    def gcloud(self, call: Call, docker: MachineDocker) -> str:
        if call.words[:2] == ("auth", "configure-docker"):
            docker.logins.update(host for word in call.words[2:] for host in word.split(","))
        elif call.words[:2] == ("storage", "cp"):
            self._copy(*call.words[2:4])
        return ""

    def _copy(self, uri: str, target: str) -> None:
        bucket, _, path = uri.removeprefix("gs://").partition("/")
        if why := bucket_trouble(self.project, uri, "read", self.account, self.scopes):
            raise Refusal(f"ERROR: (gcloud.storage.cp) HTTPError {why}")
        source = object_store.folder(self.project.account, bucket) / path
        if not source.exists():
            raise Refusal(f"ERROR: (gcloud.storage.cp) The following URLs matched no objects or files: {uri}")
        if source.is_dir():
            shutil.copytree(source, Path(target) / source.name, dirs_exist_ok=True)
        else:
            shutil.copy(source, target)


def access_trouble(project: Project, spec_text: str, service_account: str, scopes: Sequence[str]) -> str:
    """Return which address of the run's spec a machine of this service account cannot reach, and why."""
    spec = parse_spec(spec_text)
    if spec is None:
        return "spec.toml: is not a spec"
    for uri, what in ((str(spec.data.path), "read"), (str(spec.store.root), "write")):
        if uri.startswith("gs://") and (why := bucket_trouble(project, uri, what, service_account, scopes)):
            return why
    return ""


def bucket_trouble(project: Project, uri: str, what: str, service_account: str,
                   scopes: Sequence[str] = ("cloud-platform",)) -> str:
    """Return why a service account cannot read or write an address of a bucket, or an empty text."""
    name = uri.removeprefix("gs://").partition("/")[0]
    if project.resources.find("bucket", name) is None:
        return f"404 from Cloud Storage: The specified bucket does not exist. ({uri})"
    if not any("cloud-platform" in one for one in scopes) or not project.allows(
            f"serviceAccount:{service_account}", what, f"buckets/{name}"):
        verb = "storage.objects.create" if what == "write" else "storage.objects.get"
        return f"403 from Cloud Storage: {service_account} does not have {verb} access to {uri}"
    return ""


def answer(project: Project, command: Invocation, instance: Resource) -> str:
    """Return what `gcloud compute ssh NAME --command=…` prints; tailing the log waits for the training."""
    words = command.text("--command")
    if "tail" not in words:
        return ""
    run = instance.attributes["labels"].get("embark-run", "")
    group = sorted((one for one in project.resources.of_kind("instance")
                    if one.attributes["labels"].get("embark-run", "") == run), key=lambda one: one.name)
    if "logs" not in instance.attributes:
        _train(project, command, run, group)
    return str(instance.attributes["logs"])


def _train(project: Project, command: Invocation, run: str, group: list[Resource]) -> None:
    services = []
    for one in group:
        name = one.name.rpartition("/")[2]
        account, scopes = one.attributes["service_account"], one.attributes["scopes"]
        found = boot(project, name, one.attributes["metadata"], account, scopes)
        trouble = found.trouble or access_trouble(project, found.spec, account, scopes)
        if trouble:
            command.fail(f"[/usr/bin/ssh] the log of {name} ends with, and the service restarts for ever: {trouble}")
        services.append(found)
    spec = parse_spec(services[0].spec)
    assert spec is not None
    if len(group) != spec.place.nodes:
        command.fail(f"[/usr/bin/ssh] the log of {group[0].name} waits for ever: {len(group)} of "
                     f"{spec.place.nodes} machines have joined")
    done = training.train(run, [one.words for one in services], {}, services[0].spec)
    if not done.is_ok:
        command.fail(f"[/usr/bin/ssh] exited with return code [1]. {done.sentence}")
    for one, log in zip(group, done.logs.values(), strict=True):
        one.attributes["logs"] = log
