"""Which objects a kubectl command names: by kind, name, selector and field."""

from cloudsim.grammar import ParsedCommand
from cloudsim.kubernetes.cluster import Cluster, Object
from cloudsim.kubernetes.json_path import find
from cloudsim.kubernetes.kinds import ObjectKind
from cloudsim.programs.kubectl_output import is_selected, node_object
from cloudsim.state import Refused


def find_objects(cluster: Cluster, words: list[str], command: ParsedCommand, *, is_optional: bool = False
          ) -> list[Object]:
    space = None if command["--all-namespaces"] else command.text("--namespace", "default")
    if not words:
        raise Refused("error: You must specify the type of resource to get.")
    if len(words) == 1 and "/" not in words[0]:
        kinds = [find_kind(cluster, word) for word in words[0].split(",")]
        found = [one for kind in kinds for one in all_objects(cluster, kind, space)]
        selector = command.text("--selector")
        fields = command.text("--field-selector")
        found = [one for one in found if is_selected(one, selector)]
        for part in filter(None, fields.split(",")):
            name, _, value = part.replace("==", "=").partition("=")
            found = [one for one in found if value in [str(each) for each in find(f".{name}", one)]]
        return found
    things = []
    for kind, where, name in named(cluster, command, words):
        thing = next((one for one in all_objects(cluster, kind, where) if one["metadata"]["name"] == name), None)
        if thing is None:
            if command["--ignore-not-found"] or is_optional:
                continue
            raise Refused(not_found(kind, name))
        things.append(thing)
    return things


def named(cluster: Cluster, command: ParsedCommand, words: list[str] | None = None
           ) -> list[tuple[ObjectKind, str, str]]:
    """`job dlrm`, `job/dlrm`, or all of a kind by --all or a selector."""
    words = list(command.positionals["WORDS"]) if words is None else words
    space = command.text("--namespace", "default")
    pairs = [word.split("/", 1) for word in words if "/" in word]
    if pairs:
        return [(find_kind(cluster, kind), space, name) for kind, name in pairs]
    if not words:
        raise Refused("error: resource(s) were provided, but no name was specified")
    kind = find_kind(cluster, words[0])
    names = words[1:]
    if not names and (command["--all"] or command["--selector"]):
        names = [one["metadata"]["name"] for one in all_objects(cluster, kind, space)
                 if is_selected(one, command.text("--selector"))]
    elif not names:
        raise Refused("error: resource(s) were provided, but no name was specified")
    return [(kind, space, name) for name in names]


def find_kind(cluster: Cluster, word: str) -> ObjectKind:
    for kind in cluster.kinds():
        if kind.is_called(word):
            return kind
    raise Refused(f'error: the server doesn\'t have a resource type "{word}"')


def all_objects(cluster: Cluster, kind: ObjectKind, space: str | None) -> list[Object]:
    if kind.key == "Node":
        return [node_object(cluster, node) for node in cluster.nodes]
    if kind.key == "Event":
        return [{"apiVersion": "v1", "kind": "Event", "type": one.type, "reason": one.reason,
                 "message": one.message, "lastTimestamp": f"{one.at:012.1f}",
                 "metadata": {"name": one.name, "namespace": one.namespace},
                 "involvedObject": {"kind": one.kind, "name": one.name}}
                for one in cluster.events if space in (None, one.namespace)]
    return cluster.of_kind(kind.key, space if kind.is_namespaced else None)


def need(cluster: Cluster, kind: ObjectKind, space: str, name: str) -> Object:
    found = cluster.find(kind.key, name, space if kind.is_namespaced else "")
    if found is None:
        raise Refused(not_found(kind, name))
    return found


def not_found(kind: ObjectKind, name: str) -> str:
    plural = f"{kind.plural}.{kind.group}" if kind.group else kind.plural
    return f'Error from server (NotFound): {plural} "{name}" not found'
