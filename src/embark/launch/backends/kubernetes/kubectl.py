"""kubectl, with retries while the API is away; its errors in a sentence with a fix."""

import json
import re
import shlex
from collections.abc import Callable, Sequence
from typing import Literal

from embark.catalog import load_catalog
from embark.errors import EmbarkError, Fault, UserError
from embark.formatting import to_one_line
from embark.kubernetes.contract import CONTRACT, Forbidden
from embark.launch.http import API_RETRY, Unavailable, retry_api
from embark.launch.shell import CommandResult, Notify, Shell
from embark.store.errors import RetryPolicy
from embark.values import JsonDict, JsonMap, frozen, read_table

ErrorKind = Literal["away", "token", "forbidden", "not found", "there already", "no such kind", "no cluster", "other"]
_TABLE: JsonDict = read_table(__file__, "kubectl.toml")


@frozen
class Cluster:
    """A cluster as kubectl finds it."""

    context: str = ""  # Empty: the current one.
    kubeconfig: str = ""  # Files, as in KUBECONFIG; empty: ~/.kube/config.
    cloud: str = ""
    namespace: str = "default"

    @property
    def title(self) -> str:
        return f"the cluster {self.context}" if self.context else "the cluster"

    @property
    def words(self) -> list[str]:
        config = [f"--kubeconfig={self.kubeconfig}"] if self.kubeconfig else []
        return ["kubectl", *config, *([f"--context={self.context}"] if self.context else [])]

    def line(self, *words: str) -> str:
        """Return a command for a person to run."""
        return shlex.join([*self.words, *words])

    def current_context(self, shell: Shell) -> str:
        """Return the name of kubectl's current cluster; empty on a dry run. Raises if it has none."""
        done = shell.ask([*Cluster(kubeconfig=self.kubeconfig).words, "config", "current-context"])
        if not done.is_ok:
            raise UserError("kubectl has no current cluster", self.fix("no cluster"))
        return done.out.strip()

    def error(self, done: CommandResult) -> EmbarkError:
        kind = classify_error(done)
        what = _TABLE["errors"].get(kind, {}).get("what", "{where} refused it").format(where=self.title)
        return _ERRORS.get(kind, UserError)(f"{what}: {_last_line(done)}", fix=self.fix(kind, done.err))

    def fix(self, kind: ErrorKind, err: str = "") -> str:
        logins: dict[str, str] = _TABLE["logins"]
        login = logins.get(self.cloud, "")
        install = next((how for name, how in CONTRACT["installs"].items() if name in err.lower()), "")
        fix: str = _TABLE["errors"].get(kind, {}).get("fix", "")
        return fix.format(
            kubectl=self.line(), namespace=self.namespace,
            login=login or "log in to the cloud again; " + "; ".join(logins.values()),
            credentials=login.rpartition("then ")[2] or "kubectl config get-contexts; kubectl config use-context NAME",
            install=install.format_map(load_catalog().versions) or "install the operator that has this kind")


@frozen
class Kubectl:
    """kubectl on one cluster."""

    shell: Shell
    cluster: Cluster
    notify: Notify
    retry: RetryPolicy = API_RETRY

    def get(self, kind: str, name: str, *, in_namespace: bool = True) -> JsonDict | None:
        """Return an object, or None. Raises `NoSuchKind` if the cluster has no such kind at all."""
        done = self._call(lambda: self.shell.ask(self.words(
            "get", kind, name, "--output=json", "--ignore-not-found", in_namespace=in_namespace)))
        return _object(done.out)

    def items(self, kind: str, selector: str = "", *, everywhere: bool = False) -> list[JsonDict]:
        """Return the objects of a kind in the namespace or, with `everywhere`, in all of them."""
        chosen = [*([f"--selector={selector}"] if selector else []), *(["--all-namespaces"] if everywhere else [])]
        done = self._call(lambda: self.shell.ask(self.words("get", kind, "--output=json", *chosen,
                                                             in_namespace=not everywhere)))
        found = _object(done.out)
        return [] if found is None else list(found.get("items", ()))

    def raw(self, path: str) -> JsonDict | None:
        """Return the answer of the API at a path; None if there is nothing."""
        done = self._call(lambda: self.shell.ask(self.words("get", f"--raw={path}", in_namespace=False)),
                          fine=("not found", "no such kind"))
        return _object(done.out)

    def may(self, verb: str, resource: str) -> bool:
        """Return whether the user has a right, by a SelfSubjectAccessReview. `pods/log` is a subresource."""
        name, _, part = resource.partition("/")  # kubectl would take `log` for the name of a pod
        words = self.words("auth", "can-i", verb, name, *([f"--subresource={part}"] if part else []))
        done = self._call(lambda: self.shell.ask(words), fine=("other",))
        return done.out.strip() == "yes"

    def refusal(self, thing: JsonMap) -> str:
        """Return why the API server would not create an object; empty if it would. A dry run stores nothing."""
        words = self.words("create", "--dry-run=server", "--output=name", "--filename=-")
        done = self._call(lambda: self.shell.ask(words, stdin=json.dumps(thing)),
                          fine=("other", "not found", "forbidden"))
        if "cannot create resource" in done.err:  # a right of the user's, and no policy
            raise self.cluster.error(done)
        return "" if done.is_ok else _last_line(done)

    def has(self, kind: str, name: str) -> bool:
        """Return whether there is such an object; on a dry run, everything is taken to exist."""
        return self.shell.is_dry or self.get(kind, name) is not None

    def make_namespace(self) -> None:
        made = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": self.cluster.namespace}}
        self.apply(json.dumps(made), f"namespace {self.cluster.namespace}", is_check=False)

    def apply(self, text: str, name: str, *, is_check: bool) -> None:
        """Apply server-side, so that it can be repeated; with `is_check` the server only validates."""
        words = self.words("apply", "--server-side", "--field-manager=embark", "--validate=strict",
                           *(["--dry-run=server"] if is_check else []), "--filename=-")
        self._call(lambda: self.shell.change(words, stdin=text, stdin_name=name))

    def delete(self, kind: str, name: str) -> bool:
        """Delete an object and first its pods, which get SIGTERM and their grace; does not wait. False if there was
        none."""
        words = self.words("delete", kind, name, "--cascade=foreground", "--ignore-not-found", "--wait=false")
        done = self._call(lambda: self.shell.change(words), fine=("not found", "no such kind"))
        return self.shell.is_dry or (done.is_ok and bool(done.out.strip()))

    def words(self, command: str, *rest: str, in_namespace: bool = True) -> list[str]:
        where = [f"--namespace={self.cluster.namespace}"] if in_namespace else []
        limit = [] if command == "logs" else [f"--request-timeout={self.retry.request_s:g}s"]
        return [*self.cluster.words, command, *rest, *where, *limit]

    def _call(self, attempt: Callable[[], CommandResult], fine: Sequence[ErrorKind] = ()) -> CommandResult:
        """Run a command, and again while the API is away; every command here can be repeated."""
        def checked() -> CommandResult:
            done = attempt()
            kind = None if done.is_ok else classify_error(done)
            if kind == "away":
                raise Unavailable(_last_line(done))
            if kind is not None and kind not in fine:
                raise self.cluster.error(done)
            return done

        return retry_api(checked, self.retry, self.notify, name=self.cluster.title, fix=self.cluster.fix("away"))


class NoSuchKind(UserError):
    """The cluster has no such kind of object: its operator is not installed."""


_ERRORS: dict[str, type[EmbarkError]] = {"away": Fault, "no such kind": NoSuchKind, "forbidden": Forbidden}


def classify_error(done: CommandResult) -> ErrorKind:
    if done.has_timed_out:
        return "away"
    return next((kind for kind, row in _TABLE["errors"].items() if re.search(row["pattern"], done.err)), "other")


def _last_line(done: CommandResult) -> str:
    if done.has_timed_out:
        return "no answer in time"
    # kubectl logs every attempt at discovery before the error itself.
    lines = [line for line in done.err.splitlines() if line.strip() and not re.match(r"[EWI]\d{4} ", line)]
    shown = lines or done.err.strip().splitlines()[-1:]
    return to_one_line(" ".join(shown))[:600] or f"kubectl exit code {done.code}"


def _object(text: str) -> JsonDict | None:
    if not text.strip():
        return None
    try:
        read = json.loads(text)
    except ValueError as error:
        raise Fault(f"kubectl printed no JSON: {to_one_line(text)[:200]}", "try again") from error
    return read if isinstance(read, dict) else None
