"""Kubernetes: a Job with an index for each machine, a JobSet, what they need around them, and Kueue's queue."""

from typing import Any

from embark.errors import ExitCode
from embark.render.command import indexed_command
from embark.render.folder import File
from embark.render.job import EXITS, PORT, Job
from embark.render.pod import CONTAINER, config_data, node_selector, pod_metadata, pod_spec, resources, tolerations
from embark.render.targets import tpu_gke
from embark.render.yaml_text import note, plain, yaml_text

KEPT_S = 86_400
RETRIES_PER_NODE = 3
_IDENTITY_ANNOTATIONS = {
    "aws": "eks.amazonaws.com/role-arn",
    "azure": "azure.workload.identity/client-id",
    "gcp": "iam.gke.io/gcp-service-account",
}
NODE = "node"
"""Of the replicated job; a pod is NAME-node-0-i."""
KUEUE_API = "kueue.x-k8s.io/v1beta2"
BESIDE = {"cpu": 1, "memory": 4}
"""Per node, for a fabric's daemon beside the trainer: processors, GiB."""
RAY_HEAD = {"cpu": 2, "memory": 8}


def render_job(job: Job) -> list[File]:
    about = (f"Trains {job.title}. "
             f"kubectl apply -f kubernetes_job.yaml; kubectl logs -n {job.namespace} -f --prefix "
             f"--max-log-requests=100 -l batch.kubernetes.io/job-name={job.name}")
    objects = [*surroundings(job), *meeting_place(job), training_job(job)]
    return [File("kubernetes_job.yaml", yaml_text(objects, about=about))]


def render_jobset(job: Job) -> list[File]:
    about = (f"Trains {job.title}. The cluster needs "
             "the JobSet controller, 0.12 or newer. kubectl apply -f jobset.yaml")
    return [File("jobset.yaml", yaml_text([*surroundings(job), jobset(job)], about=about))]


def render_kueue(job: Job) -> list[File]:
    """None where the spec names no queue."""
    if not job.spec.place.queue:
        return []
    about = (f"The queue {job.spec.place.queue} for {job.num_nodes} x {job.machine.name}. The cluster needs Kueue, "
             "0.19 or newer. Apply it once, before the first run.")
    return [File("kueue.yaml", yaml_text(queue_objects(job), about=about))]


def surroundings(job: Job) -> list[dict[str, Any]]:
    """Namespace, service account and spec: what every target on Kubernetes needs. No role: pods do not use the API."""
    return [namespace(job), service_account(job), config_map(job)]


def namespace(job: Job) -> dict[str, Any]:
    return {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": job.namespace}}


def service_account(job: Job) -> dict[str, Any]:
    identity = job.spec.place.identity
    metadata: dict[str, Any] = {"name": job.spec.place.service_account, "namespace": job.namespace}
    if identity:
        metadata["annotations"] = {_IDENTITY_ANNOTATIONS[job.cloud]: identity}
    return {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": metadata, "automountServiceAccountToken": False}


def config_map(job: Job) -> dict[str, Any]:
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata(job, job.config_name),
            "data": config_data(job)}


def meeting_place(job: Job) -> list[dict[str, Any]]:
    """The headless Service by which pods find the one with index 0; none where there is one pod."""
    if job.num_pods == 1:
        return []
    return [{
        "apiVersion": "v1", "kind": "Service", "metadata": metadata(job),
        "spec": {
            "clusterIP": note("None", "headless: each pod has a name of its own"),
            "publishNotReadyAddresses": note(True, "the ranks meet before a pod is ready"),
            "selector": {"batch.kubernetes.io/job-name": job.name},
            "ports": [{"name": "rendezvous", "port": PORT}],
        },
    }]


def training_job(job: Job) -> dict[str, Any]:
    spec: dict[str, Any] = {
        "completionMode": note("Indexed", "pods have numbers, and names that stay"),
        "completions": job.num_pods,
        "parallelism": job.num_pods,
        "backoffLimit": note(RETRIES_PER_NODE * job.num_pods,
                             f"a fault fails all pods: {RETRIES_PER_NODE} for each node"),
        "podReplacementPolicy": note("Failed", "a new pod comes when the old one has let go of its GPUs"),
        "ttlSecondsAfterFinished": KEPT_S,
        **deadline(job),
        "podFailurePolicy": {"rules": failure_rules()},
    }
    pod = pod_spec(job, indexed_command(job, f"{job.name}-0.{job.name}"))
    if job.num_pods > 1:
        pod = {"subdomain": note(job.name, "with the Service of this name: pod i is NAME-i.NAME"), **pod}
    spec["template"] = {"metadata": pod_metadata(job), "spec": pod}
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": queued(job, metadata(job)), "spec": spec}


def failure_rules(container: str = CONTAINER) -> list[Any]:
    """From the table of exit codes: a lost machine is nobody's fault, a wrong spec is not tried again."""
    rules: list[Any] = [note({
        "action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}],
    }, "preempted, evicted or drained: replaced, and not counted")]
    for row in EXITS:
        if not row.must_retry:
            rules.append(note(_on_code("FailJob", container, row.code), f"{row.means}: it would be again"))
        elif row.means.startswith("preempted"):
            rules.append(note(_on_code("Ignore", container, row.code), f"{row.means}: replaced, and not counted"))
    return rules  # any other code counts against backoffLimit


def metadata(job: Job, name: str = "") -> dict[str, Any]:
    return {"name": name or job.name, "namespace": job.namespace, "labels": dict(job.labels)}


def queued(job: Job, described: dict[str, Any]) -> dict[str, Any]:
    """With the label by which Kueue takes an object into its queue; without one, that is said to people and linter."""
    if not job.spec.place.queue:
        if job.num_pods == 1 or job.spec.place.target == "ray":  # Ray places its workers itself
            return described
        why = "embark-lint: ignore EMB129: place.queue is not set, so pods start as room comes and wait for each other"
        return {**described, "name": note(described["name"], why)}
    return {**described, "labels": {**described["labels"], "kueue.x-k8s.io/queue-name": job.spec.place.queue}}


def deadline(job: Job) -> dict[str, int]:
    hours = job.spec.place.max_hours
    return {} if hours is None else {"activeDeadlineSeconds": max(1, round(hours * 3600))}


def _on_code(action: str, container: str, code: int) -> dict[str, Any]:
    return {"action": action, "onExitCodes": {"containerName": container, "operator": "In", "values": [int(code)]}}


def jobset(job: Job) -> dict[str, Any]:
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": _metadata(job),
        "spec": {
            "network": {"enableDNSHostnames": True, "subdomain": job.name,
                        "publishNotReadyAddresses": note(True, "the ranks meet before a pod is ready")},
            "ttlSecondsAfterFinished": KEPT_S,
            "failurePolicy": {
                "maxRestarts": RETRIES_PER_NODE,
                "restartStrategy": note("BlockingRecreate", "no new pod before every old one has let go of its GPUs"),
                "rules": _rules(),
            },
            "replicatedJobs": [{"name": NODE, "replicas": _num_slices(job), "template": {"spec": _child(job)}}],
        },
    }


def _child(job: Job) -> dict[str, Any]:
    pod = pod_spec(job, indexed_command(job, f"{job.name}-{NODE}-0-0.{job.name}"))
    return {
        "completionMode": "Indexed",
        "completions": job.num_pods // _num_slices(job),
        "parallelism": job.num_pods // _num_slices(job),
        "backoffLimit": note(0, "the first lost pod ends the attempt of all: the JobSet starts them again together"),
        **deadline(job),
        "podFailurePolicy": {"rules": [
            note({"action": "FailJob", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
                 "the reason PodFailurePolicy tells the rules above that nothing is wrong with the run"),
            {"action": "FailJob",
             "onExitCodes": {"containerName": CONTAINER, "operator": "In", "values": _told_codes()}},
        ]},
        "template": {"metadata": pod_metadata(job), "spec": pod},
    }


def _metadata(job: Job) -> dict[str, Any]:
    described = queued(job, metadata(job))
    if not job.is_tpu or job.machine.num_hosts == 1:
        return described
    return {**described, "annotations": {
        tpu_gke.EXCLUSIVE: note(tpu_gke.NODE_POOL, "all hosts of a slice are of one node pool, and no other run's")}}


def _num_slices(job: Job) -> int:
    """A slice of a TPU is a job of its own: its hosts come and go together."""
    return job.num_nodes if job.is_tpu else 1


def _rules() -> list[Any]:
    bad = [int(row.code) for row in EXITS if not row.must_retry]
    return [
        note({"name": "wrong", "action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"],
              "onJobFailureMessagePatterns": [f"exit code {code} " for code in bad]},
             "the spec or the data is wrong: it would be again"),
        note({"name": "preempted", "action": "RestartJobSetAndIgnoreMaxRestarts",
              "onJobFailureReasons": ["PodFailurePolicy"]},
             "a machine was taken away, or the run saved and asked to be started again: not counted"),
    ]


def _told_codes() -> list[int]:
    return sorted(int(row.code) for row in EXITS if row.code != ExitCode.FAULT)


def queue_objects(job: Job) -> list[dict[str, Any]]:
    queue = job.spec.place.queue
    flavor = f"{_label(job.machine.name)}{'-spot' if job.is_spot else ''}"
    quota = _quota(job)
    return [
        namespace(job),
        {"apiVersion": KUEUE_API, "kind": "ResourceFlavor", "metadata": {"name": flavor},
         "spec": {"nodeLabels": node_selector(job), "tolerations": [plain(t) for t in tolerations(job)]}},
        {"apiVersion": KUEUE_API, "kind": "ClusterQueue", "metadata": {"name": queue},
         "spec": {
             "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": job.namespace}},
             "resourceGroups": [{
                 "coveredResources": list(quota),
                 "flavors": [{"name": flavor, "resources": [
                     {"name": name, "nominalQuota": amount} for name, amount in quota.items()
                 ]}],
             }],
         }},
        {"apiVersion": KUEUE_API, "kind": "LocalQueue", "metadata": {"name": queue, "namespace": job.namespace},
         "spec": {"clusterQueue": queue}},
    ]


def _quota(job: Job) -> dict[str, Any]:
    """As much as the run's machines give: every resource that a pod names must be covered, or it waits for ever."""
    asked = plain(resources(job))
    each = {**asked["limits"], **asked["requests"]}
    quota: dict[str, Any] = {}
    for name, amount in each.items():
        number, unit = _split(str(amount))
        total = (number + BESIDE.get(name, 0)) * job.num_pods
        total += RAY_HEAD.get(name, 0) if job.spec.place.target == "ray" else 0
        quota[name] = f"{total}{unit}" if unit else total
    first = next(iter(quota))
    return {**quota, first: note(quota[first], f"{job.num_nodes} machines; raise all of them for more")}


def _split(amount: str) -> tuple[int, str]:
    digits = amount.rstrip("GMKTi")
    return int(digits), amount[len(digits):]


def _label(name: str) -> str:
    return "".join(c if c.isalnum() else "-" for c in name.lower()).strip("-")
