"""Kubernetes: a Job, a JobSet, Kubeflow's TrainJob and PyTorchJob, Ray's RayJob, Kueue's queue, and the script that
sets up a cloud and submits them."""

from functools import partial

from embark.errors import ExitCode
from embark.kubernetes.names import IDENTITY_ANNOTATIONS
from embark.kubernetes.objects import split_quantity
from embark.render.command import SPEC_PATH, WAIT_S, indexed_command, plain_command, ranks_words
from embark.render.folder import File, Files
from embark.render.image import RAY_VERSION
from embark.render.job import EXITS, MAX_FLEX_H, PORT, Job
from embark.render.pod import (
    CONTAINER,
    config_data,
    env_rows,
    identity_label,
    pod_values,
    resources,
    storage_settings,
)
from embark.render.serving import artifact_of, export_bytes, export_memory_gib
from embark.render.shell_text import job_text, python_text, script_file
from embark.render.volumes import needs_copy, volume_text
from embark.render.yaml_text import note, plain
from embark.values import JsonDict
from .serve import start_s

MANIFESTS = {
    "job": ("kubernetes_job.yaml", "job.batch"),
    "jobset": ("jobset.yaml", "jobset.jobset.x-k8s.io"),
    "trainjob": ("trainjob.yaml", "trainjob.trainer.kubeflow.org"),
    "pytorchjob": ("pytorchjob.yaml", "pytorchjob.kubeflow.org"),
    "ray": ("rayjob.yaml", "rayjob.ray.io")
}
"""The file of each target, and kubectl's name for its object."""
CONTAINERS = {"job": CONTAINER, "jobset": CONTAINER, "trainjob": "node", "pytorchjob": "pytorch", "ray": "ray-worker"}
"""Trainer 2 gives its variables to a container `node`; the training operator's webhook takes `pytorch` only."""
KEPT_S = 86_400
START_LIMIT_S = (1800, 86_400)  # Seconds until all pods must run: as a rule, and where capacity is waited for.
RETRIES_PER_NODE = 3
FAILURES_PER_NODE = 10
BESIDE = {"cpu": 1, "memory": 4}  # Processors and GiB on each node for a fabric's daemon.
RAY_HEAD = {"cpu": 1, "memory": 4}  # The head fits an ordinary machine of the cluster.
RAY_SCRIPT = "ray_train.py"
EXPORT_FILE = "export_job.yaml"
EXPORT_DISK_GIB = 2  # An export writes to the object store; logs and the fetched small files of a run stay.
NAMES = {"aws": "train_dlrm_aws.sh", "azure": "train_dlrm_azure.sh", "gcp": "train_dlrm_gcp.sh"}
CLUSTER_SCRIPTS = {"aws": "eks_cluster.sh", "azure": "aks_cluster.sh", "gcp": "gke_cluster.sh"}
PLACEHOLDER_REGISTRY = "registry.example.com/"


def render_manifest(job: Job, *, target: str) -> Files:
    """Write the objects of one target, with the namespace, service account and spec that they need."""
    path = MANIFESTS[target][0]
    return [File(path, job_text(f"kubernetes/{path}.j2", job, **_values(job, target)))]


render_job = partial(render_manifest, target="job")
render_jobset = partial(render_manifest, target="jobset")
render_trainjob = partial(render_manifest, target="trainjob")
render_pytorchjob = partial(render_manifest, target="pytorchjob")


def render_ray(job: Job) -> Files:
    """Write a RayJob for KubeRay, the RayCluster alone, and the Ray Train script that both run."""
    script = ray_script(name=job.name, spec_path=SPEC_PATH, num_machines=job.num_nodes, use_gpu=True,
                        num_processes=job.num_processes, num_cpus=job.num_cpus or job.num_processes)
    values = _values(job, "ray")
    values["config"] |= {RAY_SCRIPT: script}
    values["env"].append(note(
        {"name": "RAY_kill_child_processes_on_worker_exit_with_raylet_subreaper", "value": "true"},
        "ranks do not outlive the Ray worker that started them"))
    values |= {"ports": {}, "ray_version": RAY_VERSION, "head": RAY_HEAD}
    return [*(File(path, job_text(f"kubernetes/{path}.j2", job, **values))
              for path in (MANIFESTS["ray"][0], "raycluster.yaml")), File(RAY_SCRIPT, script)]


def render_kueue(job: Job) -> Files:
    """Write the queue, if the spec names one that does not exist."""
    if not job.place.queue or job.place.is_existing:
        return []
    return [File("kueue.yaml", job_text("kubernetes/kueue.yaml.j2", job, flavor=job.location.pool, quota=_quota(job),
                                        max_run_s=round(3600 * (job.place.max_hours or MAX_FLEX_H)),
                                        **pod_values(job)))]


def render_export_job(job: Job) -> Files:
    """Write the Job that exports the run near its bucket: a checkpoint may be too large for the way to a laptop."""
    spec = job.spec
    if job.target not in MANIFESTS or "://" not in spec.store.root:
        return []
    run, artifact = f"{spec.store.root.rstrip('/')}/{spec.name}", artifact_of(spec)
    command = ["embark", "export", run, "--to", artifact, "--tables", spec.serve.tables]
    # A checkpoint holds the tables in float32, whatever the artifact holds.
    wait_s = 2 * start_s(export_bytes(spec))
    return [File(EXPORT_FILE, job_text(
        f"kubernetes/{EXPORT_FILE}.j2", job, exporter=f"{job.name}-export", artifact=artifact, command=command,
        container="export", exits=EXITS, kept_s=KEPT_S, wait_s=wait_s, memory_gib=export_memory_gib(spec),
        disk_gib=EXPORT_DISK_GIB, env=plain(env_rows(storage_settings(job))),
        identity_label=identity_label(job)))]


def render_launch_script(job: Job) -> Files:
    """Write `train_dlrm_CLOUD.sh`, from nothing to a trained model and back: tools, login, quota, cluster, storage,
    job."""
    if job.target not in MANIFESTS:
        return []
    manifest, kind = MANIFESTS[job.target]
    return [script_file(
        NAMES[job.cloud], "launch.sh.j2", job,
        about=f"Trains {job.spec.name} on {job.num_nodes} x {job.machine.name} of {job.cloud}: checks tools, login "
              "and quota, creates what is missing, submits the job and follows it. Safe to repeat: what exists stays. "
              "--dry-run prints every command that would change something, and runs none.",
        container=CONTAINER,
        cost=" ".join(filter(None, (job.price_text, volume_text(job)))), manifest=manifest, kind=kind,
        has_registry="/" in job.image and not job.image.startswith(PLACEHOLDER_REGISTRY),
        cluster_script=CLUSTER_SCRIPTS[job.cloud], fault_code=int(ExitCode.FAULT),
        needs_copy=needs_copy(job), start_limit_s=START_LIMIT_S[job.capacity == "flex-start"],
        queue_path=_queue_path(job))]


def _queue_path(job: Job) -> str:
    """Return kubectl's path to whether Kueue has admitted the job, and to why it has not."""
    workload = f'.items[?(@.metadata.ownerReferences[0].name=="{job.name}")].status.conditions'
    return f'jsonpath={{{workload}[?(@.type=="Admitted")].status}}|{{{workload}[?(@.type=="QuotaReserved")].message}}'


def _values(job: Job, target: str) -> JsonDict:
    hours = job.place.max_hours
    if target in ("job", "jobset"):
        first = f"{job.name}-0" if target == "job" else f"{job.name}-node-0-0"
        command = indexed_command(job, f"{first}.{job.name}")
    else:  # Kubeflow's operators give torchrun's options by PET_… variables, and KubeRay runs its own `ray start`
        command = [] if target == "ray" else plain_command(job, ranks_words())
    return {
        **pod_values(job), "command": command, "container": CONTAINERS[target], "config": config_data(job),
        "identity_annotation": IDENTITY_ANNOTATIONS[job.cloud], "exits": sorted(EXITS, key=lambda row: row.code),
        "fault_code": ExitCode.FAULT, "port": PORT, "wait_s": WAIT_S, "kept_s": KEPT_S,
        "retries_per_node": RETRIES_PER_NODE, "max_restarts": job.max_restarts,
        "deadline_s": None if hours is None else max(1, round(hours * 3600)),
        "has_subdomain": target == "job" and job.num_pods > 1,
        "has_restart_policy": target not in ("pytorchjob", "ray")  # those own restarts themselves
    }


def _quota(job: Job) -> JsonDict:
    """Return a quota of all that the run's machines have. Kueue must cover every resource that a pod names."""
    requested = plain(resources(job))
    quota: JsonDict = {}
    for name, amount in {**requested["limits"], **requested["requests"]}.items():
        number, unit = split_quantity(str(amount)) or (0, "")
        total = (int(number) + BESIDE.get(name, 0)) * job.num_pods
        total += RAY_HEAD.get(name, 0) if "ray" in job.targets else 0
        quota[name] = f"{total}{unit}" if unit else total
    return quota


def ray_script(*, name: str, spec_path: str, num_machines: int, num_processes: int, num_cpus: int,
               use_gpu: bool) -> str:
    """Python source; its constants are put in as literals, and nothing else is."""
    values = {"NAME": name, "SPEC": spec_path, "NUM_MACHINES": num_machines, "NUM_PROCESSES": num_processes,
              "NUM_CPUS": num_cpus, "USE_GPU": use_gpu, "MAX_FAILURES": FAILURES_PER_NODE * num_machines}
    return python_text("ray_train.py.j2", values, about=f"Trains {name} on {num_machines} machines with Ray Train.")
