"""kubectl: patient while the API is away, and what it says of trouble in a sentence with its fix."""

from __future__ import annotations

import json
import re
import shlex
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from embark.errors import EmbarkError, Fault, UserError
from embark.formatting import format_duration, to_one_line
from embark.launch.backend import Notify
from embark.launch.shell import CommandResult, Shell
from embark.render.targets.operators import (
    JOBSET_VERSION,
    KUBERAY_VERSION,
    KUEUE_VERSION,
    TRAINER_VERSION,
    TRAINING_OPERATOR_VERSION,
)

ErrorKind = Literal["away", "token", "forbidden", "not found", "there already", "no such kind", "no cluster", "other"]
LOGINS = {
    "aws": "aws sso login (or renew the profile's keys), then aws eks update-kubeconfig --name embark --region REGION",
    "azure": "az login, then az aks get-credentials --resource-group embark --name embark",
    "gcp": "gcloud auth login, then gcloud container clusters get-credentials embark --location REGION",
}
_APPLY = "kubectl apply --server-side --force-conflicts"
INSTALLS = {
    "jobset": f"install JobSet: {_APPLY} -f https://github.com/kubernetes-sigs/jobset/releases/download/"
              f"{JOBSET_VERSION}/manifests.yaml",
    "trainjob": f"install Kubeflow Trainer: {_APPLY} -k "
                f"'https://github.com/kubeflow/trainer.git/manifests/overlays/manager?ref={TRAINER_VERSION}'",
    "pytorchjob": f"install the training operator: {_APPLY} -k 'https://github.com/kubeflow/training-operator.git/"
                  f"manifests/overlays/standalone?ref={TRAINING_OPERATOR_VERSION}'",
    "rayjob": "install KubeRay: helm repo add kuberay https://ray-project.github.io/kuberay-helm/ && helm install "
              f"kuberay-operator kuberay/kuberay-operator --version {KUBERAY_VERSION} --namespace kuberay-system "
              "--create-namespace; or export RAY_ADDRESS=http://HEAD:8265 for a Ray cluster that is there",
    "localqueue": f"install Kueue {KUEUE_VERSION}, or leave place.queue out",
}
"""By a kind's singular: what a cluster needs that does not know it."""
_TROUBLES: tuple[tuple[ErrorKind, str], ...] = (
    ("token", r"must be logged in|Unauthorized|token (has )?expired|ExpiredToken|getting credentials: exec|"
              r"AADSTS|reauthentication|invalid_grant|provide credentials"),
    ("no cluster", r"current-context must exist|no context exists|context .* does not exist|"
                   r"no configuration has been provided|localhost:8080 was refused"),
    ("no such kind", r"doesn't have a resource type|no matches for kind|could not find the requested resource"),
    ("forbidden", r"Error from server \(Forbidden\)|is forbidden: User"),
    ("there already", r"AlreadyExists"),
    ("not found", r"\(NotFound\)"),
    ("away", r"connection refused|was refused|i/o timeout|no such host|TLS handshake timeout|connection reset|"
             r"unexpected EOF|: EOF|ServiceUnavailable|currently unable to handle|etcdserver|Too many requests|"
             r"TooManyRequests|InternalError|Timeout|deadline exceeded|network is unreachable|no route to host|"
             r"http2: client connection lost|Temporary failure in name resolution"),
)


@dataclass(frozen=True, slots=True)
class Patience:
    """How long an API that does not answer is waited for: an upgrade of its control plane takes minutes."""

    give_up_s: float = 180.0
    first_wait_s: float = 1.0
    longest_wait_s: float = 15.0
    request_s: float = 20.0
    """Of one request: one that hangs is given up, and asked again."""


@dataclass(frozen=True, slots=True)
class Cluster:
    """Which one, as kubectl finds it."""

    context: str = ""
    """Empty: the current one."""
    kubeconfig: str = ""
    """Files, as in KUBECONFIG; empty: ~/.kube/config."""
    cloud: str = ""
    namespace: str = "default"

    @property
    def words(self) -> list[str]:
        config = [f"--kubeconfig={self.kubeconfig}"] if self.kubeconfig else []
        return ["kubectl", *config, *([f"--context={self.context}"] if self.context else [])]

    def line(self, *words: str) -> str:
        """A command for a person to run."""
        return shlex.join([*self.words, *words])


class Kubectl:
    """Of one cluster."""

    def __init__(self, shell: Shell, cluster: Cluster, *, tell: Notify, patience: Patience | None = None) -> None:
        self.cluster = cluster
        self._shell = shell
        self._tell = tell
        self._patience = patience or Patience()

    def get(self, kind: str, name: str, *, in_namespace: bool = True) -> dict[str, Any] | None:
        """None where there is none of that name. Raises `NoSuchKind` where the cluster has no such kind at all."""
        done = self._patiently(lambda: self._shell.ask(self.words(
            "get", kind, name, "--output=json", "--ignore-not-found", in_namespace=in_namespace)))
        return _object(done.out)

    def items(self, kind: str, selector: str = "") -> list[dict[str, Any]]:
        chosen = [f"--selector={selector}"] if selector else []
        done = self._patiently(lambda: self._shell.ask(self.words("get", kind, "--output=json", *chosen)))
        found = _object(done.out)
        return [] if found is None else list(found.get("items", ()))

    def has(self, kind: str, name: str) -> bool:
        """On a dry run everything that must be there is taken to be."""
        return self._shell.is_dry or self.get(kind, name) is not None

    def make_namespace(self) -> None:
        made = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": self.cluster.namespace}}
        self.apply(json.dumps(made), f"namespace {self.cluster.namespace}", is_try=False)

    def apply(self, text: str, name: str, *, is_try: bool) -> None:
        """Server-side, so that it can be repeated; with `is_try` the server checks all and keeps nothing."""
        words = self.words("apply", "--server-side", "--field-manager=embark", "--validate=strict",
                           *(["--dry-run=server"] if is_try else []), "--filename=-")
        self._patiently(lambda: self._shell.change(words, stdin=text, stdin_name=name))

    def delete(self, kind: str, name: str) -> bool:
        """Its pods first; they get SIGTERM and their own grace. Does not wait. Whether there was one."""
        words = self.words("delete", kind, name, "--cascade=foreground", "--ignore-not-found", "--wait=false")
        done = self._patiently(lambda: self._shell.change(words), fine=("not found", "no such kind"))
        return self._shell.is_dry or (done.is_ok and bool(done.out.strip()))

    def words(self, verb: str, *rest: str, in_namespace: bool = True) -> list[str]:
        where = [f"--namespace={self.cluster.namespace}"] if in_namespace else []
        limit = [] if verb == "logs" else [f"--request-timeout={self._patience.request_s:g}s"]
        return [*self.cluster.words, verb, *rest, *where, *limit]

    def raise_for(self, done: CommandResult) -> None:
        raise cluster_error(done, self.cluster)

    def _patiently(self, attempt: Callable[[], CommandResult], fine: Sequence[ErrorKind] = ()) -> CommandResult:
        """Again while the API is away, and says so; every command here can be repeated."""
        until_s = time.monotonic() + self._patience.give_up_s
        wait_s = self._patience.first_wait_s
        while True:
            done = attempt()
            if done.is_ok:
                return done
            trouble = classify_error(done)
            if trouble in fine:
                return done
            left_s = until_s - time.monotonic()
            if trouble != "away" or left_s <= 0:
                raise cluster_error(done, self.cluster)
            self._tell(f"the Kubernetes API does not answer ({_last_line(done)}); trying again in "
                       f"{format_duration(wait_s)}, for {format_duration(left_s)} more")
            time.sleep(min(wait_s, left_s))
            wait_s = min(wait_s * 2, self._patience.longest_wait_s)


class Forbidden(UserError):
    """The cluster knows who asks, and does not let them."""


class NoSuchKind(UserError):
    """The cluster has no such kind of object: its operator is not installed."""


def current_context(shell: Shell, kubeconfig: str = "") -> str:
    """Empty on a dry run. Raises where kubectl has none."""
    cluster = Cluster(kubeconfig=kubeconfig)
    done = shell.ask([*cluster.words, "config", "current-context"])
    if not done.is_ok:
        raise UserError("kubectl has no current cluster", fix=_fix("no cluster", cluster, ""))
    return done.out.strip()


def classify_error(done: CommandResult) -> ErrorKind:
    """What kind of trouble kubectl met."""
    if done.has_timed_out:
        return "away"
    return next((trouble for trouble, pattern in _TROUBLES if re.search(pattern, done.err)), "other")


def cluster_error(done: CommandResult, cluster: Cluster) -> EmbarkError:
    trouble, said = classify_error(done), _last_line(done)
    where = f"the cluster {cluster.context}" if cluster.context else "the cluster"
    fix = _fix(trouble, cluster, done.err)
    if trouble == "away":
        return Fault(f"{where} does not answer: {said}", fix=fix)
    if trouble == "no such kind":
        return NoSuchKind(f"{where} does not know what is asked of it: {said}", fix=fix)
    if trouble == "forbidden":
        return Forbidden(f"{where} does not let you: {said}", fix=fix)
    begins = {
        "token": f"{where} does not know who you are any more: {said}",
        "no cluster": f"kubectl knows of no such cluster: {said}",
    }.get(trouble, f"{where} refused: {said}")
    return UserError(begins, fix=fix)


def _fix(trouble: ErrorKind, cluster: Cluster, err: str) -> str:
    if trouble == "token":
        return LOGINS.get(cluster.cloud, "log in to the cloud again; " + "; ".join(LOGINS.values()))
    if trouble == "no cluster":
        login = LOGINS.get(cluster.cloud, "").rpartition("then ")[2]
        return login or "kubectl config get-contexts; kubectl config use-context NAME"
    if trouble == "no such kind":
        known = next((how for kind, how in INSTALLS.items() if kind in err.lower()), "")
        return known or "install the operator that has this kind"
    if trouble == "forbidden":
        return f"ask for the right, and look: {cluster.line('auth', 'can-i', '--list', '-n', cluster.namespace)}"
    if trouble == "away":
        return f"is the cluster up, and the VPN on? {cluster.line('cluster-info')}"
    return ""


def _last_line(done: CommandResult) -> str:
    if done.has_timed_out:
        return "no answer in time"
    # kubectl logs every try at discovery before it says what the matter is.
    lines = [line for line in done.err.splitlines() if line.strip() and not re.match(r"[EWI]\d{4} ", line)]
    told = lines or done.err.strip().splitlines()[-1:]
    return to_one_line(" ".join(told))[:600] or f"kubectl ended with {done.code}"


def _object(text: str) -> dict[str, Any] | None:
    if not text.strip():
        return None
    try:
        read = json.loads(text)
    except ValueError as error:
        raise Fault(f"kubectl gave no JSON: {to_one_line(text)[:200]}", fix="try again") from error
    return read if isinstance(read, dict) else None
