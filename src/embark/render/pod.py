"""The pod that trains, one for each machine, the same for every kind of object that makes pods; with its fabric."""

import json
from dataclasses import dataclass, field
from typing import Any

from embark.render.command import SPEC_PATH
from embark.render.job import PORT, Job
from embark.render.settings import TOPOLOGY_PATH, FabricNeeds, fabric_needs, grace_s, settings_of, topology_xml
from embark.render.targets import tpu_gke
from embark.render.yaml_text import note

USER_ID = 1000
"""Of the user `embark` in the image."""
SCRATCH = "/scratch"
CONTAINER = "trainer"
GPU = "nvidia.com/gpu"
_SPOT_LABELS = {
    "aws": ("eks.amazonaws.com/capacityType", "SPOT"),
    "azure": ("kubernetes.azure.com/scalesetpriority", "spot"),
    "gcp": ("cloud.google.com/gke-spot", "true"),
}
_IMAGE_NOTE = ("Build it with the Dockerfile, push it to your registry and set place.image to its name there, "
               "best with its digest.")
_NVIDIA = "/usr/local/nvidia/lib64"
_HOST_LIBRARIES = "/home/kubernetes/bin/nvidia"
"""Where GKE puts the driver and the plugins on its nodes."""


def pod_metadata(job: Job) -> dict[str, Any]:
    """Labels and annotations of a pod's template."""
    metadata: dict[str, Any] = {"labels": {**job.labels, **identity_labels(job)}}
    annotations = fabric_part(job).annotations
    return {**metadata, "annotations": annotations} if annotations else metadata


def pod_spec(job: Job, command: list[str], *, container: str = CONTAINER) -> dict[str, Any]:
    """A pod's spec. Those who own restarts themselves leave `restartPolicy` out."""
    part = fabric_part(job)
    spec: dict[str, Any] = {
        "restartPolicy": note("Never", "podFailurePolicy reads exit codes, and demands it"),
        "terminationGracePeriodSeconds": note(grace_s(job), _grace_reason(job)),
        "serviceAccountName": job.spec.place.service_account,
        "automountServiceAccountToken": note(False, "training does not speak to the Kubernetes API"),
        "securityContext": tpu_gke.pod_security() if job.is_tpu else pod_security(),
        "nodeSelector": node_selector(job),
        "tolerations": tolerations(job),
    }
    if job.num_pods > 1:
        spec["affinity"] = anti_affinity(job)
    if part.sidecars:
        spec["initContainers"] = part.sidecars
    spec["containers"] = [trainer(job, command, name=container)]
    spec["volumes"] = volumes(job)
    return spec


def trainer(job: Job, command: list[str], *, name: str = CONTAINER) -> dict[str, Any]:
    """The container of the ranks."""
    container: dict[str, Any] = {
        "name": name,
        "image": job.image if job.spec.place.image else note(job.image, _IMAGE_NOTE),
        "command": command,
        "workingDir": SCRATCH,
        "env": environment(job),
    }
    ports = [{"name": "rendezvous", "containerPort": PORT}] if job.num_nodes > 1 else []
    if job.is_tpu:
        ports = tpu_gke.ports() if job.num_pods > 1 else []
    if job.spec.watch.prometheus_port:
        ports.append({"name": "metrics", "containerPort": job.spec.watch.prometheus_port})
    if ports:
        container["ports"] = ports
    return {**container, "resources": resources(job), "securityContext": container_security(job),
            "volumeMounts": mounts(job)}


def environment(job: Job) -> list[Any]:
    """Each variable with its reason."""
    others = ("NCCL_", "TORCH_") if job.is_tpu else ()
    rows = [note({"name": s.name, "value": s.value}, s.why) for s in settings_of(job) if not s.name.startswith(others)]
    rows.append(note({"name": "HOME", "value": SCRATCH}, "caches and local files go to the pod's own disk"))
    rows += [note({"name": name, "value": value}, why) for name, value, why in storage_settings(job)]
    return rows


def storage_settings(job: Job) -> list[tuple[str, str, str]]:
    account = job.spec.place.storage_account
    return [("AZURE_STORAGE_ACCOUNT_NAME", account, "the account of the az:// containers")] if account else []


def resources(job: Job) -> dict[str, Any]:
    """Requests leave room for what runs on every node; a GPU and a fabric device are asked for by their limits."""
    requests: dict[str, Any] = {}
    limits: dict[str, Any] = {accelerator(job): job.num_processes, **fabric_part(job).limits}
    if job.num_cpus is not None:
        requests["cpu"] = note(str(job.num_cpus), f"of the {_number(job.machine.vcpus)} of {job.machine.name}, what is "
                                                  "left beside the kubelet and the agents on every node")
    if job.memory_gib is not None:
        requests["memory"] = f"{job.memory_gib}Gi"
        limits["memory"] = f"{job.memory_gib}Gi"
    return {"requests": requests, "limits": limits}


def accelerator(job: Job) -> str:
    """The resource that a pod asks for."""
    return tpu_gke.RESOURCE if job.is_tpu else GPU


def container_security(job: Job) -> dict[str, Any]:
    if job.is_tpu:
        return tpu_gke.container_security()
    capabilities: dict[str, Any] = {"drop": ["ALL"]}
    added = fabric_part(job).capabilities
    if added:
        capabilities["add"] = note(added, "the fabric pins memory; for a user who is not root the node's limit of "
                                          "locked memory must be unlimited besides")
    return {"allowPrivilegeEscalation": False, "capabilities": capabilities}


def pod_security() -> dict[str, Any]:
    return {"runAsNonRoot": True, "runAsUser": USER_ID, "runAsGroup": USER_ID, "fsGroup": USER_ID,
            "seccompProfile": {"type": "RuntimeDefault"}}


def node_selector(job: Job) -> dict[str, Any]:
    machine, place = job.machine, job.spec.place
    selector: dict[str, Any] = {"node.kubernetes.io/instance-type": machine.machine_type or machine.name}
    if job.is_tpu:
        selector = tpu_gke.selector(job)
    elif job.cloud == "gcp" and machine.gke_accelerator:
        selector["cloud.google.com/gke-accelerator"] = machine.gke_accelerator
    if job.is_spot:
        name, value = _SPOT_LABELS[job.cloud]
        selector[name] = value
    if place.zone and job.cloud != "azure":
        selector["topology.kubernetes.io/zone"] = place.zone
    return selector


def tolerations(job: Job) -> list[Any]:
    kind = "TPU" if job.is_tpu else "GPU"
    found: list[Any] = [note({"key": accelerator(job), "operator": "Exists", "effect": "NoSchedule"},
                             f"{kind} nodes are tainted, so that nothing else lands on them")]
    if job.is_spot and job.cloud in ("azure", "gcp"):
        name, value = _SPOT_LABELS[job.cloud]
        found.append({"key": name, "operator": "Equal", "value": value, "effect": "NoSchedule"})
    return found


def anti_affinity(job: Job) -> dict[str, Any]:
    """One pod a node."""
    term = {"labelSelector": {"matchLabels": dict(job.labels)}, "topologyKey": "kubernetes.io/hostname"}
    return {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [term]}}


def mounts(job: Job) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = [
        {"name": "spec", "mountPath": SPEC_PATH.rpartition("/")[0], "readOnly": True},
        {"name": "shm", "mountPath": "/dev/shm"},
        {"name": "scratch", "mountPath": SCRATCH},
    ]
    if job.spec.place.volume:
        found.append({"name": "data", "mountPath": job.spec.place.volume_path})
    return found + fabric_part(job).mounts


def volumes(job: Job) -> list[Any]:
    found: list[Any] = [
        {"name": "spec", "configMap": {"name": job.config_name}},
        note({"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": f"{job.shm_gib}Gi"}},
             "NCCL and data loaders share memory here; a container's own is 64 MB"),
        {"name": "scratch", "emptyDir": {}},
    ]
    if job.spec.place.volume:
        found.append({"name": "data", "persistentVolumeClaim": {"claimName": job.claim_name}})
    return found + fabric_part(job).volumes


def identity_labels(job: Job) -> dict[str, str]:
    """Azure's webhook looks for a label on the pod."""
    is_used = job.cloud == "azure" and (job.spec.place.identity or job.spec.place.storage_account)
    return {"azure.workload.identity/use": "true"} if is_used else {}


def config_data(job: Job) -> dict[str, str]:
    """The files that the pod reads under /etc/embark."""
    data = {SPEC_PATH.rpartition("/")[2]: job.spec_toml}
    topology = topology_xml(job)
    return {**data, TOPOLOGY_PATH.rpartition("/")[2]: topology} if topology else data


def _grace_reason(job: Job) -> str:
    if not job.is_spot:
        return "to save after a notice; a drained node waits as long"
    return {"aws": "what AWS gives between the notice and the end", "azure": "what Azure gives at least",
            "gcp": "what GKE gives the pods of a spot node unless its pool is told to give more"}[job.cloud]


def _number(value: float | None) -> str:
    return "?" if value is None else f"{value:g}"


@dataclass(frozen=True, slots=True)
class FabricPart:
    """Of a pod."""

    annotations: dict[str, Any] = field(default_factory=dict)
    limits: dict[str, Any] = field(default_factory=dict)
    mounts: list[dict[str, Any]] = field(default_factory=list)
    volumes: list[dict[str, Any]] = field(default_factory=list)
    sidecars: list[dict[str, Any]] = field(default_factory=list)
    capabilities: list[str] = field(default_factory=list)


def fabric_part(job: Job) -> FabricPart:
    """Nothing where one machine runs alone, or the network is the ordinary one."""
    needs = fabric_needs(job)
    if job.num_nodes == 1:
        return FabricPart()
    part = FabricPart(annotations=_networks(needs), limits=_limits(job, needs),
                      capabilities=["IPC_LOCK"] if needs.needs_ipc_lock else [])
    if needs.daemon == "tcpx-daemon":
        _add_tcpx(part, needs, job)
    elif needs.daemon == "tcpxo-daemon":
        _add_tcpxo(part, needs, job)
    elif needs.networks:
        _add_gib(part)
    return part


def _limits(job: Job, needs: FabricNeeds) -> dict[str, Any]:
    limits: dict[str, Any] = {}
    resource, count = job.machine.fabric.kubernetes_resource, job.machine.num_fabric_devices
    if resource and count:
        limits[resource] = note(count, f"all of {job.machine.name}'s; without them NCCL falls back to TCP, in silence")
    if needs.hugepages_2mi:
        limits["hugepages-2Mi"] = note(needs.hugepages_2mi, needs.why)
    return limits


def _networks(needs: FabricNeeds) -> dict[str, Any]:
    if not needs.networks:
        return {}
    pairs = [("eth0", "default"), *needs.networks]
    rows = ",\n".join("  " + json.dumps({"interfaceName": interface, "network": name}) for interface, name in pairs)
    return {
        "networking.gke.io/default-interface": "eth0",
        "networking.gke.io/interfaces": note(f"[\n{rows}\n]", "the fabric's networks; they are objects of the cluster"),
    }


def _add_tcpx(part: FabricPart, needs: FabricNeeds, job: Job) -> None:
    part.annotations[f"devices.gke.io/container.{needs.daemon}"] = _devices(job)
    part.mounts.extend([{"name": "nvidia-libraries", "mountPath": _NVIDIA},
                        {"name": "tcpx-socket", "mountPath": "/run/tcpx"}])
    part.volumes.extend([
        _host("nvidia-libraries", f"{_HOST_LIBRARIES}/lib64"), {"name": "tcpx-socket", "emptyDir": {}},
        _host("host-sys", "/sys"), _host("host-proc-sys", "/proc/sys"),
    ])
    part.sidecars.append(_daemon(needs, [
        "/tcpgpudmarxd/build/app/tcpgpudmarxd", "--gpu_nic_preset", "a3vm", "--gpu_shmem_type", "fd",
        "--uds_path", "/run/tcpx", "--setup_param", "--verbose 128 2 0 ",
    ], ["NET_ADMIN"], [{"name": "tcpx-socket", "mountPath": "/run/tcpx"}]))


def _add_tcpxo(part: FabricPart, needs: FabricNeeds, job: Job) -> None:
    part.annotations[f"devices.gke.io/container.{needs.daemon}"] = _devices(job, "/dev/dmabuf_import_helper")
    part.mounts.extend([{"name": "nvidia-libraries", "mountPath": _NVIDIA},
                    {"name": "aperture-devices", "mountPath": "/dev/aperture_devices"}])
    part.volumes.extend([
        _host("nvidia-libraries", f"{_HOST_LIBRARIES}/lib64"), _host("aperture-devices", "/dev/aperture_devices"),
        _host("host-sys", "/sys"), _host("host-proc-sys", "/proc/sys"),
    ])
    part.sidecars.append(_daemon(needs, [
        "/bin/sh", "-c",
        f"chmod 755 /fts/entrypoint_rxdm_container.sh && exec /fts/entrypoint_rxdm_container.sh --num_hops=2 "
        f"--num_nics={len(needs.networks)} --uid= --alsologtostderr",
    ], ["NET_ADMIN", "NET_BIND_SERVICE"], []))


def _add_gib(part: FabricPart) -> None:
    part.mounts.extend([{"name": "nvidia-libraries", "mountPath": "/usr/local/nvidia"},
                    {"name": "gib", "mountPath": "/usr/local/gib"}])
    part.volumes.extend([_host("nvidia-libraries", _HOST_LIBRARIES), _host("gib", "/home/kubernetes/bin/gib")])


def _daemon(needs: FabricNeeds, command: list[str], capabilities: list[str],
            mounts: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "name": needs.daemon,
        "image": needs.daemon_image,
        "restartPolicy": note("Always", "a native sidecar: there before the ranks, and no reason for the pod to stay"),
        "command": command,
        "env": [{"name": "LD_LIBRARY_PATH", "value": _NVIDIA}],
        "securityContext": note({
            "runAsUser": 0, "runAsNonRoot": False, "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"], "add": capabilities},
        }, f"{needs.why}; only root may steer the flows"),
        "resources": {"requests": {"cpu": "1", "memory": "1Gi"}, "limits": {"memory": "4Gi"}},
        "volumeMounts": [{"name": "nvidia-libraries", "mountPath": _NVIDIA}, *mounts,
                         {"name": "host-sys", "mountPath": "/hostsysfs"},
                         {"name": "host-proc-sys", "mountPath": "/hostprocsysfs"}],
    }


def _devices(job: Job, *more: str) -> str:
    """The annotation's own little YAML, in which a path needs no quotes."""
    paths = [f"/dev/nvidia{i}" for i in range(job.num_processes)] + ["/dev/nvidiactl", "/dev/nvidia-uvm", *more]
    return "".join(f"- path: {path}\n" for path in paths)


def _host(name: str, path: str) -> dict[str, Any]:
    return {"name": name, "hostPath": {"path": path}}
