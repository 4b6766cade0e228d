"""A Kubernetes Job with an index for each machine, and what it needs around it."""

from typing import Any

from embark.render.command import indexed_command
from embark.render.file import File
from embark.render.job import EXITS, PORT, Job
from embark.render.pod import CONTAINER, config_data, pod_metadata, pod_spec
from embark.render.yaml_text import note, yaml_text

KEPT_S = 86_400
RETRIES_PER_NODE = 3
_IDENTITY_ANNOTATIONS = {
    "aws": "eks.amazonaws.com/role-arn",
    "azure": "azure.workload.identity/client-id",
    "gcp": "iam.gke.io/gcp-service-account",
}


def render_job(job: Job) -> list[File]:
    about = (f"Trains {job.title}. "
             f"kubectl apply -f kubernetes_job.yaml; kubectl logs -n {job.namespace} -f --prefix "
             f"--max-log-requests=100 -l batch.kubernetes.io/job-name={job.name}")
    objects = [*surroundings(job), *meeting_place(job), training_job(job)]
    return [File("kubernetes_job.yaml", yaml_text(objects, about=about))]


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
