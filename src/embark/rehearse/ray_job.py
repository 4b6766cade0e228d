"""A RayJob of KubeRay: a Ray cluster's head and workers, the pod that submits the driver to it, and what its end means.

Pods run `ray start` as KubeRay writes it (ray-operator/controllers/ray/common/pod.go and job.go, 1.7), but for what
Ray's nodes on one machine would otherwise share: ports, folders and memory.
"""

from dataclasses import dataclass, replace

from embark.kubernetes.failure_policies import Decision, PodEnd
from embark.kubernetes.objects import K8sObject, Objects, at, name_of, namespace_of, quantity, rows
from embark.kubernetes.pods import POD_IP, Mount, Pod, PodIdentity, Service, make_pod, read_services

CLUSTER, NODE_TYPE = "ray.io/cluster", "ray.io/node-type"
SUBMITTER = "ray-job-submitter"
GCS_PORT, DASHBOARD_PORT, CLIENT_PORT, AGENT_PORT, METRICS_PORT = 6379, 8265, 10001, 52365, 18080
FOLDER = "/tmp/ray"
NO_RAY, INSTALL_RAY = "Ray is not installed here", "pip install 'ray[default,train]'"
STORE_BYTES = 80 << 20
_SUBMITTER_SPEC: K8sObject = {"restartPolicy": "Never", "containers": [{"name": SUBMITTER, "resources": {
    "requests": {"cpu": "500m", "memory": "200Mi"}, "limits": {"cpu": "1", "memory": "1Gi"}}}]}
_SETTINGS = {
    "RAY_USAGE_STATS_ENABLED": "0",
    # a process that sets its title leaves its environment, by which the processes of a pod are found
    "SPT_NOENV": "1",
    # processors are counted here and not there: Ray would start a worker for each of them
    "RAY_prestart_worker_first_driver": "0", "RAY_enable_worker_prestart": "0",
    # a node on a machine that does much else is slow, and not dead
    "RAY_health_check_timeout_ms": "60000", "RAY_worker_register_timeout_seconds": "300",
    "RAY_memory_monitor_refresh_ms": "0",
}
_WAIT = "head={address}; until (: <>/dev/tcp/${{head%:*}}/${{head#*:}}) 2>/dev/null; do sleep 0.5; done"


@dataclass(slots=True)
class RayJobPolicy:
    """The submitter's end decides; other pods are replaced. A driver that failed gets a new cluster."""

    name: str
    backoff_limit: int
    num_failed: int = 0

    def decide(self, end: PodEnd) -> Decision:
        if end.pod.container != SUBMITTER:
            return Decision("replace", f"{end.pod.name} ended with exit code {end.code}")
        if end.code == 0:
            return Decision("succeed", f"RayJob {self.name} is complete")
        self.num_failed += 1
        what = f"RayJob {self.name}: its driver failed"
        if self.num_failed > self.backoff_limit:
            return Decision("fail", f"{what}, and its backoffLimit is {self.backoff_limit}", "AppFailed")
        return Decision("restart all", f"{what}: attempt {self.num_failed} of the {self.backoff_limit} more that "
                                       "backoffLimit allows")


def ray_pods(job: K8sObject, objects: Objects) -> tuple[Pod, ...]:
    """Head, workers and, of a RayJob, the submitter."""
    name, space = name_of(job), namespace_of(job)
    cluster = at(job, "spec.rayClusterSpec") or at(job, "spec") or {}
    head = at(cluster, "headGroupSpec") or {}
    groups = [("head", 1, head), *((f"{row.get('groupName')}-worker", int(row.get("replicas") or 1), row)
                                   for row in rows(cluster, "workerGroupSpecs"))]
    pods: list[Pod] = []
    for group, count, row in groups:
        for number in range(count):
            labels = {CLUSTER: name, NODE_TYPE: "worker" if pods else "head"}
            identity = PodIdentity(name=f"{name}-{group}-{number}", namespace=space, index=len(pods), group=group,
                                   labels=labels)
            pod = make_pod(row.get("template") or {}, identity, objects)
            pods.append(replace(pod, command=("/bin/bash", "-c", "--"), args=(_start_command(pod, name, row),),
                                env={**pod.env, **_SETTINGS}, trains=bool(pods),
                                mounts=(*pod.mounts, Mount(FOLDER, "shared", "ray"))))
    if at(job, "spec.rayClusterSpec") is None:
        return tuple(pods)
    shared = [mount for mount in pods[-1].mounts if mount.kind == "shared" and mount not in pods[0].mounts]
    pods[0] = replace(pods[0], mounts=(*pods[0].mounts, *shared))  # the spec that it reads names their paths
    return (*pods, _submitter(job, pods[0], len(pods), objects))


def ray_services(job: K8sObject, objects: Objects) -> list[Service]:
    head = {CLUSTER: name_of(job), NODE_TYPE: "head"}
    return [*read_services(objects), Service(f"{name_of(job)}-head-svc", namespace_of(job), head, True, True)]


def _submitter(job: K8sObject, head: Pod, index: int, objects: Objects) -> Pod:
    """A Job's pod in the cluster. The driver itself runs on the head, so paths are those of the head's mounts."""
    name = name_of(job)
    spec = at(job, "spec.submitterPodTemplate.spec") or _SUBMITTER_SPEC
    identity = PodIdentity(name=f"{name}-submitter-0", namespace=namespace_of(job), index=index, group="submitter",
                           labels={"batch.kubernetes.io/job-name": name, "job-name": name})
    spec = {**spec, "containers": [{"image": head.image, **rows(spec, "containers")[0]}]}
    address = f"{name}-head-svc:{DASHBOARD_PORT}"
    command = (f"{_WAIT.format(address=address)}; exec ray job submit --address http://{address} "
               f"-- {at(job, 'spec.entrypoint')}")
    return replace(make_pod({"spec": spec}, identity, objects), command=("/bin/bash", "-c"), args=(command,),
                   mounts=head.mounts, trains=False)


def _start_command(pod: Pod, name: str, group: K8sObject) -> str:
    container = next(one for one in rows(pod.spec, "containers") if one.get("name") == pod.container)
    limits, requests = at(container, "resources.limits") or {}, at(container, "resources.requests") or {}
    cpus = quantity(str(limits.get("cpu") or requests.get("cpu") or "0")) or 0.0
    gpus = {"num-gpus": str(limits["nvidia.com/gpu"])} if "nvidia.com/gpu" in limits else {}
    params = {"num-cpus": f"{-(-cpus // 1):g}", **gpus, **(group.get("rayStartParams") or {})}
    own = {"node-ip-address": POD_IP, "object-store-memory": STORE_BYTES, "temp-dir": FOLDER, "min-worker-port": 0,
           "max-worker-port": 0, "metrics-export-port": METRICS_PORT + pod.index,
           "dashboard-agent-listen-port": AGENT_PORT + pod.index}
    if pod.index == 0:
        own |= {"port": GCS_PORT, "dashboard-port": DASHBOARD_PORT, "ray-client-server-port": CLIENT_PORT}
    else:
        own |= {"address": f"{name}-head-svc:{GCS_PORT}", "include-log-monitor": "false"}
    words = " ".join(f"--{key}={value}" for key, value in (params | own).items())
    if pod.index == 0:
        return f"exec ray start --head {words} --no-monitor --block"
    # Ray names a node's socket by those that are there: two that start at once would take the same name
    before = f"{FOLDER}/session_latest/sockets/raylet{f'.{pod.index - 1}' if pod.index > 1 else ''}"
    return (f"{_WAIT.format(address=own['address'])}; until [ -e {before} ]; do sleep 0.5; done; "
            f"exec ray start {words} --block")
