"""Ray on Kubernetes: a RayJob for KubeRay, the RayCluster alone, and the Ray Train script that both run."""

from typing import Any

from embark.render.command import SPEC_PATH
from embark.render.folder import File
from embark.render.image import RAY_VERSION
from embark.render.job import Job
from embark.render.pod import (
    SCRATCH,
    anti_affinity,
    config_data,
    pod_metadata,
    pod_security,
    pod_spec,
)
from embark.render.shell_text import python_text
from embark.render.targets.kubernetes import config_map, deadline, metadata, namespace, queued, service_account
from embark.render.yaml_text import note, yaml_text

API = "ray.io/v1"
SCRIPT = "ray_train.py"
FAILURES_PER_NODE = 10
_FOLDER = SPEC_PATH.rpartition("/")[0]


def render_ray(job: Job) -> list[File]:
    return [
        File("rayjob.yaml", yaml_text([*_surroundings(job), ray_job(job)], about=(
            f"Trains {job.title}, with Ray Train. The cluster needs KubeRay 1.7. "
            "kubectl apply -f rayjob.yaml"))),
        File("raycluster.yaml", yaml_text([*_surroundings(job), ray_cluster(job)], about=(
            f"A Ray cluster that stays, for {job.title}. "
            f"ray job submit --address http://HEAD:8265 -- python {_FOLDER}/{SCRIPT}"))),
        File(SCRIPT, ray_script(job)),
    ]


def ray_job(job: Job) -> dict[str, Any]:
    return {
        "apiVersion": API, "kind": "RayJob", "metadata": queued(job, metadata(job)),
        "spec": {
            "entrypoint": f"python {_FOLDER}/{SCRIPT}",
            "shutdownAfterJobFinishes": note(True, "the machines are paid until the cluster is gone"),
            "ttlSecondsAfterFinished": 600,
            "backoffLimit": 1,
            **deadline(job),
            "rayClusterSpec": _cluster_spec(job),
        },
    }


def ray_cluster(job: Job) -> dict[str, Any]:
    return {"apiVersion": API, "kind": "RayCluster", "metadata": queued(job, metadata(job)), "spec": _cluster_spec(job)}


def _surroundings(job: Job) -> list[dict[str, Any]]:
    config = config_map(job)
    config["data"] = {**config_data(job), SCRIPT: ray_script(job)}
    return [namespace(job), service_account(job), config]


def _cluster_spec(job: Job) -> dict[str, Any]:
    workers = pod_spec(job, [], container="ray-worker")
    del workers["restartPolicy"]  # KubeRay replaces pods itself
    container = workers["containers"][0]
    del container["command"]  # KubeRay's own: ray start
    container.pop("ports", None)
    container["env"] = [*container["env"], note(
        {"name": "RAY_kill_child_processes_on_worker_exit_with_raylet_subreaper", "value": "true"},
        "ranks do not outlive the Ray worker that started them")]
    if job.num_nodes > 1:
        workers["affinity"] = anti_affinity(job)
    return {
        "rayVersion": RAY_VERSION,
        "headGroupSpec": {
            "rayStartParams": {"num-cpus": note("0", "nothing but Ray itself runs on the head")},
            "template": {"metadata": {"labels": {**job.labels, "app.kubernetes.io/component": "head"}},
                         "spec": _head(job)},
        },
        "workerGroupSpecs": [{
            "groupName": "machines",
            "replicas": job.num_nodes, "minReplicas": job.num_nodes, "maxReplicas": job.num_nodes,
            "rayStartParams": {"num-gpus": str(job.num_processes)},
            "template": {"metadata": pod_metadata(job), "spec": workers},
        }],
    }


def _head(job: Job) -> dict[str, Any]:
    return {
        "serviceAccountName": job.spec.place.service_account,
        "automountServiceAccountToken": False,
        "securityContext": pod_security(),
        "containers": [{
            "name": "ray-head",
            "image": job.image,
            "workingDir": SCRATCH,
            "env": [{"name": "HOME", "value": SCRATCH}],
            "ports": [{"name": "gcs", "containerPort": 6379}, {"name": "dashboard", "containerPort": 8265},
                      {"name": "client", "containerPort": 10001}],
            "resources": {"requests": {"cpu": "2", "memory": "8Gi"}, "limits": {"memory": "8Gi"}},
            "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
            "volumeMounts": [{"name": "spec", "mountPath": _FOLDER, "readOnly": True},
                             {"name": "scratch", "mountPath": SCRATCH}],
        }],
        "volumes": [{"name": "spec", "configMap": {"name": job.config_name}}, {"name": "scratch", "emptyDir": {}}],
    }


def ray_script(job: Job, spec_path: str = SPEC_PATH) -> str:
    """Python source. Its constants are put in as literals, and nothing else is."""
    return script_text(name=job.name, spec_path=spec_path, num_machines=job.num_nodes, num_processes=job.num_processes,
                       num_cpus=job.num_cpus or job.num_processes, use_gpu=True)


def script_text(*, name: str, spec_path: str, num_machines: int, num_processes: int, num_cpus: int,
                use_gpu: bool) -> str:
    values = {"NAME": name, "SPEC": spec_path, "NUM_MACHINES": num_machines, "NUM_PROCESSES": num_processes,
              "NUM_CPUS": num_cpus, "USE_GPU": use_gpu, "MAX_FAILURES": FAILURES_PER_NODE * num_machines}
    return python_text("ray_train.py.j2", values, about=f"Trains {name} on {num_machines} machines with Ray Train.")
