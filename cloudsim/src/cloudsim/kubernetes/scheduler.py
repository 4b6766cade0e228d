"""The scheduler: taints, selectors, anti-affinity, resources and claims, with the real one's messages."""

from collections import Counter, defaultdict
from collections.abc import Mapping

from cloudsim.kubernetes.cloud import NodePool
from cloudsim.kubernetes.cluster import Cluster, Node, Object, labels_of
from embark.kubernetes.objects import at, namespace_of, quantity, rows
from embark.rehearse.manifest import has_labels, meets, selects
from embark.values import JsonMap

ANTI_AFFINITY = "affinity.podAntiAffinity.requiredDuringSchedulingIgnoredDuringExecution"
NODE_AFFINITY = "affinity.nodeAffinity.requiredDuringSchedulingIgnoredDuringExecution.nodeSelectorTerms"


def choose_node(cluster: Cluster, pod: Object) -> tuple[Node | None, str]:
    """Return a node for a pod, or the message of the event FailedScheduling."""
    if error := claim_error(cluster, pod):
        return None, f"0/{len(cluster.ready_nodes())} nodes are available: {error}."
    reasons: Counter[str] = Counter()
    for node in cluster.ready_nodes():
        found = _misfits(cluster, pod, node)
        if not found:
            return node, ""
        reasons.update(found)
    return None, f"0/{len(cluster.ready_nodes())} nodes are available: {_counted(reasons) or 'no nodes'}."


def pool_that_fits(cluster: Cluster, pod: Object) -> tuple[NodePool | None, str]:
    """Return an autoscaled pool whose next node could run the pod, or why there is none."""
    reasons: Counter[str] = Counter()
    for pool in cluster.pools.values():
        if not pool.max_nodes or claim_error(cluster, pod):
            continue
        space = {name: quantity(str(amount)) or 0.0 for name, amount in pool.allocatable.items()}
        labels = cluster.labels(Node("new", pool.name, 0.0))
        misfits = [*find_taint(pool, pod), *_labels(labels, pod), *_lacks(space, requests(pod))]
        if not misfits and len(cluster.nodes_of(pool.name)) < pool.max_nodes:
            return pool, ""
        reasons.update(misfits or ["max node group size reached"])
    return None, f"pod didn't trigger scale-up: {_counted(reasons)}" if reasons else ""


def _counted(reasons: Counter[str]) -> str:
    return ", ".join(f"{count} {reason}" for reason, count in sorted(reasons.items()))


def requests(pod: JsonMap) -> dict[str, float]:
    """Add up the requests of all containers and sidecars; other init containers run before them."""
    spec = pod.get("spec") or {}
    total = defaultdict[str, float](float)
    sidecars = [one for one in rows(spec, "initContainers") if one.get("restartPolicy") == "Always"]
    for container in [*rows(spec, "containers"), *sidecars]:
        amounts = {**(at(container, "resources.limits") or {}), **(at(container, "resources.requests") or {})}
        for name, amount in amounts.items():
            total[str(name)] += quantity(str(amount)) or 0.0
    return total


def claim_error(cluster: Cluster, pod: Object) -> str:
    for volume in rows(pod, "spec.volumes"):
        name = at(volume, "persistentVolumeClaim.claimName")
        if name is None:
            continue
        claim = cluster.find("PersistentVolumeClaim", str(name), namespace_of(pod))
        if claim is None:
            return f'persistentvolumeclaim "{name}" not found'
        if at(claim, "status.phase") != "Bound":
            return "pod has unbound immediate PersistentVolumeClaims"
    return ""


def _misfits(cluster: Cluster, pod: Object, node: Node) -> list[str]:
    labels = cluster.labels(node)
    if found := [*find_taint(cluster.pools[node.pool], pod), *_labels(labels, pod)]:
        return found
    running = [one for one in cluster.of_kind("Pod") if at(one, "status.phase") not in ("Succeeded", "Failed")]
    for term in rows(pod, f"spec.{ANTI_AFFINITY}"):
        key = str(term.get("topologyKey"))
        near = [other.name for other in cluster.nodes if cluster.labels(other).get(key) == labels.get(key, "")]
        if any(at(one, "spec.nodeName") in near and selects(term.get("labelSelector"), labels_of(one))
               for one in running):
            return ["node(s) didn't match pod anti-affinity rules"]
    space = cluster.allocatable(node)
    for one in [one for one in running if at(one, "spec.nodeName") == node.name]:
        for name, amount in requests(one).items():
            space[name] = space.get(name, 0.0) - amount
    return _lacks(space, requests(pod))


def find_taint(pool: NodePool, pod: JsonMap) -> list[str]:
    """Return the scheduler's message about the first taint that a pod does not tolerate, or nothing."""
    tolerations = rows(pod, "spec.tolerations")
    for taint in pool.taints:
        if taint.get("effect") not in ("NoSchedule", "NoExecute"):
            continue
        if not any(_tolerates(one, taint) for one in tolerations):
            return [f"node(s) had untolerated taint {{{taint['key']}: {taint.get('value', '')}}}"]
    return []


def _tolerates(toleration: JsonMap, taint: Mapping[str, str]) -> bool:
    if toleration.get("effect") not in (None, "", taint.get("effect")):
        return False
    key, operator = toleration.get("key"), toleration.get("operator", "Equal")
    if operator == "Exists":
        return key in (None, "", taint["key"])
    return key == taint["key"] and str(toleration.get("value", "")) == taint.get("value", "")


def _labels(labels: Mapping[str, str], pod: JsonMap) -> list[str]:
    wrong = ["node(s) didn't match Pod's node affinity/selector"]
    if not has_labels(labels, at(pod, "spec.nodeSelector") or {}):
        return wrong
    terms = rows(pod, f"spec.{NODE_AFFINITY}")
    if terms and not any(all(meets(labels, one) for one in rows(term, "matchExpressions")) for term in terms):
        return wrong
    return []


def _lacks(space: Mapping[str, float], wanted: Mapping[str, float]) -> list[str]:
    return [f"Insufficient {name}" for name, amount in wanted.items() if amount > space.get(name, 0.0) + 1e-9]
