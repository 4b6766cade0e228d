"""`kubectl`: parses its arguments and answers from the current cluster."""

import json
import re
from base64 import b64encode
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import yaml

from cloudsim.account import Account, AnsweredBy, Call
from cloudsim.grammar import ParsedCommand, load_grammar
from cloudsim.kubernetes.admission import admit, apply, install, refuse_client_side, release_at
from cloudsim.kubernetes.cluster import Cluster, Object
from cloudsim.kubernetes.json_path import find
from cloudsim.kubernetes.kinds import ObjectKind
from cloudsim.kubernetes.kubelet import route
from cloudsim.programs.kubectl_output import is_selected, node_object, show
from cloudsim.state import Refusal
from embark.kubernetes.objects import at, name_of, namespace_of, rows
from embark.kubernetes.pods import main_container
from embark.rehearse.server import find_port

AUTOSCALER = "/api/v1/namespaces/kube-system/configmaps/cluster-autoscaler-status"
STEP_S = 15.0  # The interval at which `kubectl wait` and `logs --follow` look.
POLL_S = 60.0  # The time that passes before a program asks word for word what it has just asked.

METHODS = {"annotate": "mark", "label": "mark", "events": "get", "cluster-info": "info", "auth": "may",
           "api-resources": "kinds", "port-forward": "forward"}
"""The commands that are not called as the method that answers them."""


class Kubectl:
    name = "kubectl"
    answered_by: AnsweredBy = "stand-in"

    def __init__(self, account: Account) -> None:
        self._account = account
        self._grammar = load_grammar("kubectl")
        self._asked: dict[tuple[str, ...], float] = {}  # Maps the words of a `get` to the time of its last answer.

    def run(self, call: Call) -> str:
        command = self._grammar.parse(call.words)
        name = command.path[0]
        if name == "config":
            return self._config(command)
        if name == "version":
            return "Client Version: v1.37.1\n"
        if name == "patch" and command["--local"]:
            return _patch_local(command, call)
        handler: Callable[[ParsedCommand, Call], str] | None = getattr(self, f"_{METHODS.get(name, name)}", None)
        if handler is None:
            raise Refusal(f"error: kubectl {command.name} is not modelled by the simulated account")
        return handler(command, call)

    # clusters

    def _config(self, command: ParsedCommand) -> str:
        account = self._account
        if command.name == "config use-context":
            wanted = str(command.positionals["NAME"])
            if wanted not in account.clusters:
                raise Refusal(f'error: no context exists with the name: "{wanted}"')
            account.context = wanted
            return f'Switched to context "{wanted}".\n'
        if command.name == "config current-context":
            if not account.context:
                raise Refusal("error: current-context is not set")
            return f"{account.context}\n"
        return "".join(f"{name}\n" for name in account.clusters)

    def _cluster(self, command: ParsedCommand) -> Cluster:
        context = command.text("--context")
        if context and context not in self._account.clusters:
            raise Refusal(f'error: context "{context}" does not exist')
        return self._account.clusters[context] if context else self._account.cluster()

    def _info(self, command: ParsedCommand, call: Call) -> str:
        return f"Kubernetes control plane is running: {self._cluster(command).name}\n"

    def _may(self, command: ParsedCommand, call: Call) -> str:
        part = command.text("--subresource")
        words = " ".join(command.positionals["WORDS"]) + (f"/{part}" if part else "")
        if words in self._cluster(command).denied:
            raise Refusal("", out="no\n")
        return "yes\n"

    def _raw(self, cluster: Cluster, path: str) -> str:
        """Answer the paths by which a client discovers the API."""
        if path == "/version":
            major, minor = cluster.version.split(".")[:2]
            return json.dumps({"major": major, "minor": minor, "gitVersion": f"v{cluster.version}.0"})
        if path == AUTOSCALER and any(pool.max_nodes for pool in cluster.pools.values()):
            return json.dumps({"kind": "ConfigMap", "data": {"status": "Healthy"}})
        version = path.removeprefix("/apis/").removeprefix("/api/")
        group, _, number = version.rpartition("/")
        found = [{"name": one.plural, "kind": one.kind, "namespaced": one.is_namespaced} for one in cluster.kinds()
                 if one.group == group and number in one.versions]
        if not found:
            raise Refusal("Error from server (NotFound): the server could not find the requested resource")
        return json.dumps({"kind": "APIResourceList", "groupVersion": version, "resources": found})

    def _top(self, command: ParsedCommand, call: Call) -> str:
        self._cluster(command)
        raise Refusal("error: Metrics API not available")

    def _kinds(self, command: ParsedCommand, call: Call) -> str:
        return "".join(f"{kind.plural}\t{kind.group}\t{kind.kind}\n" for kind in self._cluster(command).kinds())

    # changes

    def _apply(self, command: ParsedCommand, call: Call) -> str:
        cluster = self._cluster(command)
        lines: list[str] = []
        errors: list[str] = []
        for kustomize, address in [*((False, one) for one in command["--filename"] or []),
                                   *([(True, command["--kustomize"])] if command["--kustomize"] else [])]:
            if address.startswith(("https://", "http://", "github.com/")):
                release = release_at(address, kustomize=kustomize)
                if not command["--server-side"]:
                    refuse_client_side(release)
                lines += install(cluster, release, command.text("--namespace", "default"))
                continue
            for thing in _documents(call, address):
                try:
                    if command.text("--dry-run", "none") in ("none", ""):
                        said = apply(cluster, thing, address, command.text("--namespace"))
                    else:
                        cluster.kind_of(thing, address)
                        said = f"{thing['kind'].lower()}/{thing['metadata']['name']} configured (server dry run)"
                    lines.append(re.sub(" (created|configured)", " serverside-applied", said)
                                 if command["--server-side"] else said)
                except Refusal as refusal:
                    errors.append(refusal.text)
        if not lines and not errors:
            raise Refusal("error: no objects passed to apply")
        if errors:
            raise Refusal("\n".join(errors))
        return "".join(f"{line}\n" for line in lines)

    def _create(self, command: ParsedCommand, call: Call) -> str:
        cluster, space = self._cluster(command), command.text("--namespace", "default")
        words = command.path[1:]
        if not words:
            make = admit if command.text("--dry-run") == "server" else partial(apply, create=True)
            return "".join(f"{make(cluster, thing, name, command.text('--namespace'))}\n"
                           for name in command["--filename"] or [] for thing in _documents(call, name))
        kind = _find_kind(cluster, words[0]).kind
        thing: Object = {"apiVersion": "v1", "kind": kind, "metadata": {"name": str(command.positionals["NAME"])}}
        if kind in ("ConfigMap", "Secret"):
            values = dict(one.split("=", 1) for one in command["--from-literal"] or [])
            for one in command["--from-file"] or []:
                name, _, path = one.rpartition("=")
                values[name or path.rpartition("/")[2]] = call.read(path)
            thing["data"] = values if kind == "ConfigMap" else {
                key: b64encode(value.encode()).decode() for key, value in values.items()}
        if command.text("--dry-run", "none") in ("client", ""):
            return yaml.safe_dump(thing)
        return f"{apply(cluster, thing, 'create', space, create=True)}\n"

    def _delete(self, command: ParsedCommand, call: Call) -> str:
        cluster = self._cluster(command)
        if command["--filename"]:
            found = [(cluster.kind_of(thing, name), namespace_of(thing), name_of(thing))
                     for name in command["--filename"] for thing in _documents(call, name)]
        else:
            found = _named(cluster, command)
        lines = []
        for kind, space, name in found:
            key = (kind.key, space if kind.is_namespaced else "", name)
            if key not in cluster.objects:
                if command["--ignore-not-found"]:
                    continue
                raise Refusal(_not_found(kind, name))
            cluster.objects.pop(key)
            if kind.key == "Namespace":
                for other in [one for one in cluster.objects if one[1] == name]:
                    cluster.objects.pop(other)
            lines.append(f'{kind.resource} "{name}" deleted\n')
        return "".join(lines)

    def _mark(self, command: ParsedCommand, call: Call) -> str:
        cluster = self._cluster(command)
        words = list(command.positionals["WORDS"])
        marks = [word for word in words if "=" in word or word.endswith("-")]
        field = "annotations" if command.path[0] == "annotate" else "labels"
        names = [word for word in words if word not in marks]
        verb = "annotated" if field == "annotations" else "labeled"
        lines = []
        for kind, space, name in _named(cluster, command, names):
            thing = _need(cluster, kind, space, name)
            held = thing["metadata"].setdefault(field, {})
            for mark in marks:
                key, has_value, value = mark.partition("=")
                if not has_value:
                    held.pop(key[:-1], None)
                elif key in held and held[key] != value and not command["--overwrite"]:
                    raise Refusal(f"error: overwriting is false but found the following declared {field[:-1]}(s): "
                                  f"'{key}' already has a value ({held[key]})")
                else:
                    held[key] = value
            lines.append(f"{kind.resource}/{name} {verb}\n")
        return "".join(lines)

    def _patch(self, command: ParsedCommand, call: Call) -> str:
        cluster = self._cluster(command)
        lines = []
        for kind, space, name in _named(cluster, command):
            thing = _need(cluster, kind, space, name)
            merged = _merge(thing, yaml.safe_load(command.text("--patch")))
            apply(cluster, merged, "patch")
            lines.append(f"{kind.resource}/{name} patched\n")
        return "".join(lines)

    def _scale(self, command: ParsedCommand, call: Call) -> str:
        cluster = self._cluster(command)
        for kind, space, name in _named(cluster, command):
            _need(cluster, kind, space, name).setdefault("spec", {})["replicas"] = int(command.text("--replicas"))
        return "scaled\n"

    # reads

    def _get(self, command: ParsedCommand, call: Call) -> str:
        cluster = self._cluster(command)
        words = list(command.positionals["WORDS"])
        if self._asked.get(call.words) == cluster.clock.now:
            # Who asks again has waited in between, without a program of this account.
            cluster.advance(POLL_S)
        self._asked[call.words] = cluster.clock.now
        if command["--raw"]:
            return self._raw(cluster, command.text("--raw"))
        if command.path[0] == "events":
            words = ["events"]
        found = _find_objects(cluster, words, command)
        if not found and command["--ignore-not-found"]:
            return ""
        return show(found, command, is_list=len(words) == 1 and "/" not in words[0])

    def _describe(self, command: ParsedCommand, call: Call) -> str:
        cluster = self._cluster(command)
        text = ""
        for thing in _find_objects(cluster, list(command.positionals["WORDS"]), command):
            text += yaml.safe_dump(thing)
            text += "".join(f"Events: {one.type} {one.reason} {one.message}\n" for one in cluster.events
                            if one.name == name_of(thing))
        return text

    def _wait(self, command: ParsedCommand, call: Call) -> str:
        """Advance the clock until the condition holds or the time is over."""
        cluster = self._cluster(command)
        conditions: list[str] = command["--for"] or []
        limit = _seconds(command.text("--timeout", "30s"))
        if not conditions:
            raise Refusal("error: --for is required: condition, delete, create or jsonpath")
        words = list(command.positionals["WORDS"])
        until = cluster.clock.now + limit
        while True:
            found = _find_objects(cluster, words, command, is_optional=bool({"delete", "create"} & set(conditions)))
            if conditions == ["delete"]:
                is_met = not found
            elif conditions == ["create"]:
                is_met = bool(found)
            elif not found:
                raise Refusal("error: no matching resources found")
            else:
                is_met = all(_meets(cluster, one, each) for one in found for each in conditions)
            if is_met:
                return "".join(f"{one['kind'].lower()}/{one['metadata']['name']} condition met\n" for one in found)
            if cluster.clock.now >= until:
                name = name_of(found[0]) if found else " ".join(words)
                raise Refusal(f"error: timed out waiting for the condition on {words[0].partition('/')[0]}/{name}")
            cluster.advance(min(STEP_S, until - cluster.clock.now))

    def _rollout(self, command: ParsedCommand, call: Call) -> str:
        cluster = self._cluster(command)
        for kind, space, name in _named(cluster, command):
            _need(cluster, kind, space, name)
            ready = cluster.ready_at.get((kind.key, space, name), 0.0)
            cluster.advance(max(0.0, ready - cluster.clock.now))
            found = _need(cluster, kind, space, name)
            until = cluster.clock.now + (_seconds(command.text("--timeout", "0s")) or float("inf"))
            while rows(status := found.get("status") or {}, "conditions") and not (
                    status["updatedReplicas"] == status["replicas"] == int(at(found, "spec.replicas") or 1)):
                if any(one["reason"] == "ProgressDeadlineExceeded" for one in rows(status, "conditions")):
                    raise Refusal(f'error: deployment "{name}" exceeded its progress deadline')
                if cluster.clock.now >= until:
                    raise Refusal("error: timed out waiting for the condition")
                cluster.advance(STEP_S)
        return "successfully rolled out\n"

    def _forward(self, command: ParsedCommand, call: Call) -> str:
        """Return the words for `cloudsim.forward`: the reader's port, that of the container, and the one on which the
        server of the pod answers here."""
        cluster, space = self._cluster(command), command.text("--namespace", "default")
        name, ports = command.positionals["WORDS"]
        mine, _, there = str(ports).partition(":")
        [(kind, space, name)] = _named(cluster, command, [name])
        found = _need(cluster, kind, space, name)
        if kind.key == "Service":
            pods, number, error = route(cluster, found, there or mine)
        else:
            pods, (number, error) = [found], find_port(main_container(found["spec"]), there or mine)
        if error:
            raise Refusal(f"error: lost connection to pod: {error}")
        here = next(filter(None, (cluster.servers.port(space, name_of(one)) for one in pods)), 0)
        if not here:
            raise Refusal("error: unable to forward port because pod is not running")
        return f"{mine} {number} {here}"

    def _logs(self, command: ParsedCommand, call: Call) -> str:
        cluster, space = self._cluster(command), command.text("--namespace", "default")
        words = list(command.positionals["WORDS"])
        selector = command.text("--selector")
        if not words and not selector:
            raise Refusal("error: expected 'logs [-f] [-p] (POD | TYPE/NAME) [-c CONTAINER]'.\nPOD or TYPE/NAME is a "
                          "required argument for the logs command")
        pods = [one for one in cluster.of_kind("Pod", space) if (is_selected(one, selector) if selector else
                name_of(one) == words[0].rpartition("/")[2] or _is_owned(one, words[0]))]
        if not pods:
            if selector:
                return ""
            raise Refusal(f'error: error from server (NotFound): pods "{words[0]}" not found in namespace "{space}"')
        many = int(command.text("--max-log-requests", "5"))
        if command["--follow"] and len(pods) > many:
            raise Refusal(f"error: you are attempting to follow {len(pods)} log streams, but maximum allowed "
                          f"concurrency is {many}, use --max-log-requests to increase the limit")
        text = ""
        for pod in pods:
            phase, name = pod["status"].get("phase"), name_of(pod)
            container = command.text("--container")
            names = [one.get("name") for one in pod["spec"].get("containers", [])]
            if container and container not in names:
                raise Refusal(f"error: container {container} is not valid for pod {name}")
            if phase == "Pending":
                raise Refusal(f'Error from server (BadRequest): container "{names[0]}" in pod "{name}" is waiting to '
                              f"start: {_waiting(pod)}")
            owner = tuple(pod["metadata"]["ownerReferences"][0]["key"])
            logs = cluster.runs[owner].logs.get(name, "") if owner in cluster.runs else ""
            prefix = f"[pod/{name}/{names[0]}] " if command["--prefix"] else ""
            text += "".join(f"{prefix}{line}\n" for line in logs.splitlines())
            if phase == "Running" and owner in cluster.runs:
                # Who reads a log again and again sleeps in between, which is no program of this account.
                cluster.advance(max(0.0, cluster.runs[owner].ends_at - cluster.clock.now) if command["--follow"] else
                                STEP_S)
        return text


def _documents(call: Call, name: str) -> list[Object]:
    path = call.folder / name
    names = [str(one) for one in sorted(path.iterdir()) if one.suffix in (".yaml", ".yml", ".json")] \
        if name != "-" and path.is_dir() else [name]
    found = []
    for one in names:
        try:
            found += [thing for thing in yaml.load_all(call.read(one), yaml.CSafeLoader) if thing]
        except yaml.YAMLError as error:
            raise Refusal(f"error: error parsing {one}: {error}") from error
    return found


def _patch_local(command: ParsedCommand, call: Call) -> str:
    things = [_merge(thing, yaml.safe_load(command.text("--patch")))
              for name in command["--filename"] or [] for thing in _documents(call, name)]
    if command.text("--output") == "json":
        return "".join(json.dumps(thing) + "\n" for thing in things)
    return yaml.safe_dump_all(things)


def _merge(thing: Any, patch: Any) -> Any:
    """Apply a JSON merge patch (RFC 7386)."""
    if not isinstance(patch, Mapping) or not isinstance(thing, Mapping):
        return patch
    merged = dict(thing)
    for key, value in patch.items():
        if value is None:
            merged.pop(key, None)
        else:
            merged[key] = _merge(merged.get(key, {}), value)
    return merged


def _meets(cluster: Cluster, thing: Object, condition: str) -> bool:
    kind, _, rest = condition.partition("=")
    if kind == "jsonpath":
        path, _, wanted = rest.partition("}")
        values = find(path.lstrip("'{"), thing)
        return wanted.strip("'=") in map(str, values) if "=" in wanted else any(values)
    name, _, wanted = rest.partition("=")
    key = (thing["kind"], thing["metadata"].get("namespace", ""), name_of(thing))
    if key in cluster.ready_at and name.lower() == "available":
        return cluster.ready_at[key] <= cluster.clock.now
    for one in rows(thing, "status.conditions"):
        if one.get("type", "").lower() == name.lower():
            return str(one.get("status", "")).lower() == (wanted or "true").lower()
    return False


def _is_owned(pod: Object, word: str) -> bool:
    owners = [one["name"] for one in rows(pod, "metadata.ownerReferences")]
    return "/" in word and word.rpartition("/")[2] in owners


def _waiting(pod: Object) -> str:
    statuses = pod["status"].get("containerStatuses") or []
    return str(statuses[0]["state"]["waiting"]["reason"]) if statuses else "ContainerCreating"


def _seconds(text: str) -> float:
    units = {"s": 1.0, "m": 60.0, "h": 3600.0}
    total, digits = 0.0, ""
    for char in text:
        if char in units:
            total, digits = total + float(digits) * units[char], ""
        else:
            digits += char
    return total + (float(digits) if digits else 0.0)


def _find_objects(cluster: Cluster, words: list[str], command: ParsedCommand, *, is_optional: bool = False
          ) -> list[Object]:
    space = None if command["--all-namespaces"] else command.text("--namespace", "default")
    if not words:
        raise Refusal("error: You must specify the type of resource to get.")
    if len(words) == 1 and "/" not in words[0]:
        kinds = [_find_kind(cluster, word) for word in words[0].split(",")]
        for kind in kinds:
            if f"list {kind.plural}" in cluster.denied:
                raise Refusal(f'Error from server (Forbidden): {kind.plural} is forbidden: User "you" cannot list '
                              f'resource "{kind.plural}" in API group "{kind.group}"')
        found = [one for kind in kinds for one in _all_objects(cluster, kind, space)]
        selector = command.text("--selector")
        fields = command.text("--field-selector")
        found = [one for one in found if is_selected(one, selector)]
        for part in filter(None, fields.split(",")):
            name, sign, value = re.fullmatch(r"([^!=]+)(!=|==?)(.*)", part).groups()  # type: ignore[union-attr]
            found = [one for one in found
                     if (value in [str(each) for each in find(f".{name}", one)]) == (sign != "!=")]
        return found
    things = []
    for kind, where, name in _named(cluster, command, words):
        thing = next((one for one in _all_objects(cluster, kind, where) if name_of(one) == name), None)
        if thing is None:
            if command["--ignore-not-found"] or is_optional:
                continue
            raise Refusal(_not_found(kind, name))
        things.append(thing)
    return things


def _named(cluster: Cluster, command: ParsedCommand, words: list[str] | None = None
           ) -> list[tuple[ObjectKind, str, str]]:
    """Return the objects that `job dlrm` or `job/dlrm` names, or all of a kind by --all or a selector."""
    words = list(command.positionals["WORDS"]) if words is None else words
    space = command.text("--namespace", "default")
    pairs = [word.split("/", 1) for word in words if "/" in word]
    if pairs:
        return [(_find_kind(cluster, kind), space, name) for kind, name in pairs]
    if not words:
        raise Refusal("error: resource(s) were provided, but no name was specified")
    kind = _find_kind(cluster, words[0])
    names = words[1:]
    if not names and (command["--all"] or command["--selector"]):
        names = [name_of(one) for one in _all_objects(cluster, kind, space)
                 if is_selected(one, command.text("--selector"))]
    elif not names:
        raise Refusal("error: resource(s) were provided, but no name was specified")
    return [(kind, space, name) for name in names]


def _find_kind(cluster: Cluster, word: str) -> ObjectKind:
    for kind in cluster.kinds():
        if kind.is_called(word):
            return kind
    raise Refusal(f'error: the server doesn\'t have a resource type "{word}"')


def _all_objects(cluster: Cluster, kind: ObjectKind, space: str | None) -> list[Object]:
    if kind.key == "Node":
        return [node_object(cluster, node) for node in cluster.nodes]
    if kind.key == "Event":
        return [{"apiVersion": "v1", "kind": "Event", "type": one.type, "reason": one.reason,
                 "message": one.message, "lastTimestamp": f"{one.at:012.1f}",
                 "metadata": {"name": one.name, "namespace": one.namespace},
                 "involvedObject": {"kind": one.kind, "name": one.name}}
                for one in cluster.events if space in (None, one.namespace)]
    return cluster.of_kind(kind.key, space if kind.is_namespaced else None)


def _need(cluster: Cluster, kind: ObjectKind, space: str, name: str) -> Object:
    found = cluster.find(kind.key, name, space if kind.is_namespaced else "")
    if found is None:
        raise Refusal(_not_found(kind, name))
    return found


def _not_found(kind: ObjectKind, name: str) -> str:
    plural = f"{kind.plural}.{kind.group}" if kind.group else kind.plural
    return f'Error from server (NotFound): {plural} "{name}" not found'
