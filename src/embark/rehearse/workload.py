"""The pods that a controller would make of a job, for each kind of controller, and the policy that it follows.

Pods of a RayJob run `ray start` as KubeRay writes it (ray-operator/controllers/ray/common/pod.go and job.go, 1.7), but
for what Ray's nodes on one machine would otherwise share: ports, folders and memory.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from embark.kubernetes.failure_policies import (
    Decision,
    FailurePolicy,
    JobPolicy,
    JobSetPolicy,
    PodEnd,
    ReplicaPolicy,
)
from embark.kubernetes.objects import K8sObject, Objects, at, name_of, namespace_of, quantity, rows
from embark.kubernetes.pods import POD_IP, Mount, Names, Pod, PodIdentity, Service, dns_names, make_pod, read_services
from embark.values import JsonDict, frozen, read_table

CLUSTER, NODE_TYPE = "ray.io/cluster", "ray.io/node-type"
SUBMITTER = "ray-job-submitter"
GCS_PORT, DASHBOARD_PORT, CLIENT_PORT, AGENT_PORT, METRICS_PORT = 6379, 8265, 10001, 52365, 18080
FOLDER = "/tmp/ray"
NO_RAY, INSTALL_RAY = "Ray is not installed here", "pip install 'ray[default,train]'"
STORE_BYTES = 80 << 20
_TABLE: JsonDict = read_table(__file__, "workload.toml")
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
    """Head, workers and, for a RayJob, the submitter."""
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
                                env={**pod.env, **_TABLE["settings"]}, trains=bool(pods),
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
    """Return the pod that submits the driver. The driver itself runs on the head, so paths are those of the head's
    mounts."""
    name = name_of(job)
    spec = at(job, "spec.submitterPodTemplate.spec") or _TABLE["submitter"]
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


INDEX = "batch.kubernetes.io/job-completion-index"
TRAINER_PORT = "29500"
OPERATOR_PORT = 23456
PYTORCH = "pytorch"  # The container that the training operator looks for.
NODE = "node"  # The replicated job and the container that Trainer looks for.
_OWN = ("PET_NNODES", "PET_NPROC_PER_NODE", "PET_NODE_RANK", "PET_MASTER_ADDR", "PET_MASTER_PORT")


@frozen
class Cause:
    """Why a job is refused or fails, the fix, and the line that shows it, if one does."""

    what: str
    fix: str
    evidence: str = ""


@frozen
class Workload:
    """A job and everything that its controller would make."""

    kind: str
    name: str
    pods: tuple[Pod, ...]
    services: tuple[Service, ...]
    refusal: Cause | None = None  # It is turned away before a pod is made.
    deadline_s: float | None = None

    @property
    def names(self) -> Names:
        return dns_names(self.pods, self.services)

    @property
    def trainers(self) -> tuple[Pod, ...]:
        return tuple(pod for pod in self.pods if pod.trains)


def make_workload(job: K8sObject, objects: Objects) -> tuple[Workload, FailurePolicy]:
    """Return the pods, and the policy that decides what follows when they end."""
    if job["kind"] == "JobSet":
        spec = job.get("spec") or {}
        return _replicated(job, spec, rows(spec, "replicatedJobs"), objects, kind="JobSet", name=name_of(job))
    if str(job.get("apiVersion")).startswith("batch.volcano.sh/"):
        return _volcano_job(job, objects)
    makers = {"Job": _job, "TrainJob": _train_job, "PyTorchJob": _pytorch_job, "RayJob": _ray_job}
    return makers[str(job["kind"])](job, objects)


def _job(job: K8sObject, objects: Objects) -> tuple[Workload, FailurePolicy]:
    name, spec = name_of(job), job.get("spec") or {}
    is_indexed = spec.get("completionMode") == "Indexed"
    pods = _child_pods(spec, name, namespace_of(job), objects, is_indexed=is_indexed)
    services, refusal = tuple(read_services(objects)), _refuses_job(spec)
    return Workload("Job", name, pods, services, refusal, _deadline(spec)), JobPolicy(name, spec)


def _replicated(
    job: K8sObject, spec: K8sObject, replicated: Sequence[K8sObject], objects: Objects, *, kind: str, name: str,
    env: Any = None, container: str = ""
) -> tuple[Workload, FailurePolicy]:
    """Return the pods of a JobSet: child Jobs NAME-JOB-i, pods NAME-JOB-i-j, one headless Service for all, made by the
    controller."""
    space = namespace_of(job)
    network = at(spec, "network") or {}
    subdomain = str(network.get("subdomain") or name)
    pods: list[Pod] = []
    children: dict[str, JobPolicy] = {}
    groups: dict[str, str] = {}
    refusal = None
    for one in replicated:
        child = _defaulted(at(one, "template.spec") or {})
        for number in range(int(one.get("replicas", 1))):
            group = f"{name}-{one.get('name')}-{number}"
            labels = {"jobset.sigs.k8s.io/jobset-name": name,
                      "jobset.sigs.k8s.io/replicatedjob-name": str(one.get("name")),
                      "jobset.sigs.k8s.io/job-index": str(number)}
            pods += _child_pods(child, group, space, objects, is_indexed=True, subdomain=subdomain, labels=labels,
                                first=len(pods), env=env, container=container)
            children[group] = JobPolicy(group, child)
            groups[group] = str(one.get("name"))
        refusal = refusal or _refuses_job(child)
    services = read_services(objects)
    if network.get("enableDNSHostnames", True):
        services.append(Service(subdomain, space, {"jobset.sigs.k8s.io/jobset-name": name}, True,
                                bool(network.get("publishNotReadyAddresses", True))))
    max_restarts = int(at(spec, "failurePolicy.maxRestarts") or 0)
    return (Workload(kind, name, tuple(pods), tuple(services), refusal),
            JobSetPolicy(name, children, groups, max_restarts, tuple(rows(spec, "failurePolicy.rules"))))


def _train_job(job: K8sObject, objects: Objects) -> tuple[Workload, FailurePolicy]:
    """Trainer 2: a JobSet from the runtime's template, with the trainer's words and torchrun's variables in it."""
    name, space = name_of(job), namespace_of(job)
    trainer = at(job, "spec.trainer") or {}
    kind = str(at(job, "spec.runtimeRef.kind") or "ClusterTrainingRuntime")
    called = str(at(job, "spec.runtimeRef.name"))
    runtime = objects.find("TrainingRuntime", called, space) if kind == "TrainingRuntime" else next(
        (one for one in objects.of_kind("ClusterTrainingRuntime") if name_of(one) == called), None)
    if runtime is None and called == "torch-distributed":
        runtime = _TABLE["torch_distributed"]
    if runtime is None:
        unknown = Cause(f"Trainer's webhook refuses it: there is no {kind} {called}",
                          "put the runtime into the same file, or name torch-distributed")
        return Workload("TrainJob", name, (), (), unknown), JobPolicy(name, {})
    num_nodes = int(trainer.get("numNodes") or at(runtime, "spec.mlPolicy.numNodes") or 1)
    num_processes = trainer.get("numProcPerNode", at(runtime, "spec.mlPolicy.torch.numProcPerNode"))
    refused = [str(row.get("name")) for row in rows(trainer, "env") if row.get("name") in _OWN]
    refusal: Cause | None = None
    if refused:
        refusal = Cause(f"Trainer's webhook refuses it: {refused[0]} is a variable of its own",
                        f"leave {refused[0]} out")
    elif isinstance(num_processes, str) and not num_processes.isdigit():
        refusal = Cause(f"the API server refuses it: numProcPerNode {num_processes!r} is no number",
                          "numProcPerNode: the GPUs of a node")
    spec = at(runtime, "spec.template.spec") or {}
    patched = [_with_trainer(one, trainer, num_nodes) for one in rows(spec, "replicatedJobs")]

    def env(index: int) -> dict[str, str]:
        return {"PET_NNODES": str(num_nodes), "PET_NPROC_PER_NODE": str(num_processes or "auto"),
                "PET_NODE_RANK": str(index), "PET_MASTER_ADDR": f"{name}-{NODE}-0-0.{name}",
                "PET_MASTER_PORT": TRAINER_PORT}

    workload, policy = _replicated(job, spec, patched, objects, kind="TrainJob", name=name, env=env, container=NODE)
    return (Workload("TrainJob", name, workload.pods, workload.services, refusal or workload.refusal,
                     _deadline(job.get("spec") or {})), policy)


def _with_trainer(replicated: K8sObject, trainer: K8sObject, num_nodes: int) -> K8sObject:
    """Return the runtime's job with what the TrainJob overrides."""
    if replicated.get("name") != NODE:
        return replicated
    patched: JsonDict = copy.deepcopy(dict(replicated))
    child = patched.setdefault("template", {}).setdefault("spec", {})
    child |= {"parallelism": num_nodes, "completions": num_nodes}
    containers: list[Any] = rows(child, "template.spec.containers")
    for container in (one for one in containers if one.get("name") == NODE):
        container |= {key: trainer[key] for key in ("image", "command", "args") if trainer.get(key)}
        if trainer.get("resourcesPerNode"):
            container["resources"] = trainer["resourcesPerNode"]
        own = {row.get("name") for row in rows(trainer, "env")}
        container["env"] = [row for row in rows(container, "env") if row.get("name") not in own] + rows(trainer, "env")
    return patched


def _pytorch_job(job: K8sObject, objects: Objects) -> tuple[Workload, FailurePolicy]:
    """Training operator 1.9: NAME-worker-i, a headless Service for each pod, MASTER_… with a master, PET_… always."""
    name, space, spec = name_of(job), namespace_of(job), job.get("spec") or {}
    replicas: dict[str, K8sObject] = {kind: one for kind in ("Master", "Worker")
                                  if isinstance(one := (spec.get("pytorchReplicaSpecs") or {}).get(kind), dict)}
    counts = {kind: int(one.get("replicas") or 1) for kind, one in replicas.items()}
    policies = {kind: str(one.get("restartPolicy") or "OnFailure") for kind, one in replicas.items()}
    pods: list[Pod] = []
    services = read_services(objects)
    for kind, one in replicas.items():
        for number in range(counts[kind]):
            called = f"{name}-{kind.lower()}-{number}"
            labels = {"training.kubeflow.org/job-name": name, "training.kubeflow.org/replica-type": kind.lower(),
                      "training.kubeflow.org/replica-index": str(number)}
            env = _operator_env(name, spec, replicas, counts, kind, number)
            identity = PodIdentity(name=called, index=len(pods), group=kind, namespace=space, labels=labels, env=env,
                                   restart_policy=policies[kind])
            pods.append(make_pod(one.get("template") or {}, identity, objects, container_name=PYTORCH))
            services.append(Service(called, space, labels, True, True))
    backoff = at(spec, "runPolicy.backoffLimit")
    policy = ReplicaPolicy(name, policies, counts, None if backoff is None else int(backoff),
                           is_elastic=at(spec, "elasticPolicy") is not None)
    workload = Workload("PyTorchJob", name, tuple(pods), tuple(services), _refuses_pytorch_job(spec, replicas),
                        _deadline(at(spec, "runPolicy") or {}))
    return workload, policy


def _operator_env(
    name: str, spec: K8sObject, replicas: dict[str, K8sObject], counts: dict[str, int], kind: str, number: int
) -> dict[str, str]:
    total = sum(counts.values())
    processes = str(spec.get("nprocPerNode") or "auto")
    env = {"PYTHONUNBUFFERED": "1", "PET_NPROC_PER_NODE": processes}
    elastic = at(spec, "elasticPolicy")
    if "Master" in replicas:
        rank = number if kind == "Master" else number + 1
        port, host = str(_port(replicas["Master"])), f"{name}-master-0"
        address = "localhost" if kind == "Master" else host
        world = total * (int(processes) if processes.isdigit() else 1)
        env |= {"MASTER_PORT": port, "PET_MASTER_PORT": port, "MASTER_ADDR": address, "PET_MASTER_ADDR": address,
                "WORLD_SIZE": str(world), "RANK": str(rank), "PET_NODE_RANK": str(rank)}
    if elastic is None:
        return {**env, "PET_NNODES": str(total)}
    low, high = elastic.get("minReplicas"), elastic.get("maxReplicas")
    workers = replicas.get("Worker") or {}
    host = str(elastic.get("rdzvHost") or f"{name}-worker-0")
    env |= {"PET_RDZV_BACKEND": str(elastic.get("rdzvBackend") or "c10d"),
            "PET_RDZV_ENDPOINT": f"{host}:{elastic.get('rdzvPort') or _port(workers)}",
            "PET_NNODES": str(counts.get("Worker", 1)) if low is None and high is None else f"{low or 1}:{high or low}"}
    for key, variable in (("maxRestarts", "PET_MAX_RESTARTS"), ("rdzvId", "PET_RDZV_ID"),
                          ("nProcPerNode", "PET_NPROC_PER_NODE")):
        if elastic.get(key) is not None:
            env[variable] = str(elastic[key])
    if conf := rows(elastic, "rdzvConf"):
        env["PET_RDZV_CONF"] = ",".join(f"{row.get('key')}={row.get('value')}" for row in conf)
    return env


def _port(replica: K8sObject) -> int:
    for container in rows(replica, "template.spec.containers"):
        for port in rows(container, "ports"):
            if container.get("name") == PYTORCH and port.get("name") == "pytorchjob-port":
                return int(port["containerPort"])
    return OPERATOR_PORT


def _ray_job(job: K8sObject, objects: Objects) -> tuple[Workload, FailurePolicy]:
    spec = job.get("spec") or {}
    workload = Workload("RayJob", name_of(job), ray_pods(job, objects), tuple(ray_services(job, objects)),
                        deadline_s=_deadline(spec))
    return workload, RayJobPolicy(name_of(job), int(spec.get("backoffLimit") or 0))


def _volcano_job(job: K8sObject, objects: Objects) -> tuple[Workload, FailurePolicy]:
    """Return what TorchX submits: a task for each replica; the plugin `svc` names the hosts of each to all."""
    name, space, tasks = name_of(job), namespace_of(job), rows(job, "spec.tasks")
    counts = {str(task.get("name")): int(task.get("replicas") or 1) for task in tasks}
    hosts = {f"VC_{task.replace('-', '_').upper()}_HOSTS": ",".join(
        f"{name}-{task}-{number}.{name}" for number in range(count)) for task, count in counts.items()}
    labels = {"volcano.sh/job-name": name}
    pods: list[Pod] = []
    for task in tasks:
        for number in range(counts[str(task.get("name"))]):
            env = {**hosts, "VC_TASK_INDEX": str(number)}
            identity = PodIdentity(name=f"{name}-{task.get('name')}-{number}", namespace=space, index=len(pods),
                                   group=name, subdomain=name, labels=labels, env=env)
            pods.append(make_pod(task.get("template") or {}, identity, objects))
    is_early = "--publish-not-ready-addresses" in (at(job, "spec.plugins.svc") or ())
    services = [*read_services(objects), Service(name, space, labels, True, is_early)]
    policy = JobSetPolicy(name, {name: JobPolicy(name, {"backoffLimit": 0})}, {name: name},
                          int(at(job, "spec.maxRetry") or 0), ())
    return Workload("Job", name, tuple(pods), tuple(services)), policy


def _child_pods(
    spec: K8sObject, name: str, space: str, objects: Objects, *, is_indexed: bool, subdomain: str = "",
    labels: dict[str, str] | None = None, first: int = 0, env: Any = None, container: str = ""
) -> tuple[Pod, ...]:
    """Return the pods of a Job that run at once."""
    pods = []
    for index in range(int(spec.get("parallelism", 1))):
        suffix = str(index) if is_indexed else f"xxxx{index}"  # stands for random letters
        annotations = {INDEX: str(index)} if is_indexed else {}
        own = {"batch.kubernetes.io/job-name": name, "job-name": name, **(labels or {}), **annotations}
        added = {"JOB_COMPLETION_INDEX": str(index)} if is_indexed else {}
        identity = PodIdentity(name=f"{name}-{suffix}", index=first + index, group=name, namespace=space,
                               subdomain=subdomain, labels=own, annotations=annotations,
                               env={**added, **(env(index) if env else {})})
        pods.append(make_pod(spec.get("template") or {}, identity, objects, container_name=container))
    return tuple(pods)


def _defaulted(child: K8sObject) -> K8sObject:
    """JobSet's webhook fills in a restart policy that starts a container again."""
    template = child.get("template") or {}
    pod = template.get("spec") or {}
    return {**child, "template": {**template, "spec": {"restartPolicy": "OnFailure", **pod}}}


def _refuses_job(spec: K8sObject) -> Cause | None:
    policy = str(at(spec, "template.spec.restartPolicy") or "Always")
    if policy not in ("Never", "OnFailure"):
        return Cause(f"the API server refuses it: restartPolicy {policy} of a Job's pods", "restartPolicy: Never")
    if at(spec, "podFailurePolicy") and policy != "Never":
        return Cause("the API server refuses it: podFailurePolicy with restartPolicy OnFailure", "restartPolicy: Never")
    return None


def _refuses_pytorch_job(spec: K8sObject, replicas: dict[str, K8sObject]) -> Cause | None:
    for kind, one in replicas.items():
        found = [str(container.get("name")) for container in rows(one, "template.spec.containers")]
        if PYTORCH not in found:
            return Cause(f"the training operator's webhook refuses it: {kind} must have a container named "
                           f"{PYTORCH}, and has {', '.join(found) or 'none'}", f"name the container {PYTORCH}")
    if spec.get("nprocPerNode") is not None and at(spec, "elasticPolicy.nProcPerNode") is not None:
        return Cause("the training operator's webhook refuses it: nprocPerNode is set twice",
                       "leave elasticPolicy.nProcPerNode out")
    return None


def _deadline(spec: K8sObject) -> float | None:
    found = spec.get("activeDeadlineSeconds")
    return None if found is None else float(found)
