"""Why a cluster's jobs and servers do not run, in the words of their controllers."""

from cloudsim.kubernetes.cluster import Cluster, Node, Object, ObjectKey
from cloudsim.kubernetes.pods import pods_owned_by
from embark.kubernetes.objects import at, name_of, rows


def find_troubles(cluster: Cluster) -> list[str]:
    """Return what keeps each job or server from running, the newest object's first."""
    found: list[str] = []
    for key in reversed(cluster.objects):
        run = cluster.runs.get(key)
        if run is None:
            continue
        thing = cluster.objects[key]
        if run.outcome is not None:
            if not run.outcome.is_ok:
                found.append(f"{thing['kind']} {key[2]} failed: {run.outcome.sentence}")
            continue
        pods = pods_owned_by(cluster, key)
        own = [_pod_trouble(cluster, one) for one in pods] if pods else [_last_event(cluster, key, thing)]
        found += [f"{thing['kind']} {key[2]}: {why}" for why in dict.fromkeys(filter(None, own))]
    scalers = [(one, state) for one in cluster.of_kind("HorizontalPodAutoscaler")
               for state in rows(one, "status.conditions")]
    return found + [f"{one['kind']} {one['metadata']['name']}: {state['message']}" for one, state in scalers
                    if state.get("status") == "False"]


def _pod_trouble(cluster: Cluster, pod: Object) -> str:
    for status in rows(pod, "status.containerStatuses"):
        if waiting := at(status, "state.waiting"):
            return f"{pod['metadata']['name']} waits: {waiting['reason']}: {waiting['message']}"
    message = next((str(one["message"]) for one in rows(pod, "status.conditions")
                    if one.get("reason") == "Unschedulable"), "")
    if not message:
        return ""
    claims = [str(at(one, "persistentVolumeClaim.claimName")) for one in rows(pod, "spec.volumes")]
    more = [f"{one.kind} {one.name}: {one.message}" for one in cluster.events
            if one.kind == "PersistentVolumeClaim" and one.name in claims and "unbound" in message]
    more += [one.message for one in cluster.events if one.reason == "NotTriggerScaleUp"
             and one.name == name_of(pod)][-1:]
    more += [f"no pool has the label {name}: {value}" for name, value in (at(pod, "spec.nodeSelector") or {}).items()
             if value not in {cluster.labels(Node("", pool, 0.0)).get(name) for pool in cluster.pools}]
    own = {node.pool: cluster.pools[node.pool] for node in cluster.nodes}.values()
    more += [f"{plugin} runs on no node of {pool.name}, so they offer no {device}" for pool in own
             for device, plugin in pool.devices_after.items()
             if f"Insufficient {device}" in message and not cluster.advertises(plugin, device, pool)]
    never = [f"the machines of {pool.name} never join: {pool.join_error}" for pool in own if pool.join_error]
    return "; ".join([*never, f"{pod['metadata']['name']} cannot be scheduled: {message}", *more])


def _last_event(cluster: Cluster, key: ObjectKey, thing: Object) -> str:
    own = [one.message for one in cluster.events if (one.kind, one.name) == (thing["kind"], key[2])]
    return own[-1] if own else ""
