"""What a fabric adds to a pod: annotations, limits, volumes, and the container that goes with it."""

import json
from dataclasses import dataclass, field
from typing import Any

from embark.render.job import Job
from embark.render.settings import FabricNeeds, fabric_needs
from embark.render.yaml_text import note

_NVIDIA = "/usr/local/nvidia/lib64"
_HOST_LIBRARIES = "/home/kubernetes/bin/nvidia"
"""Where GKE puts the driver and the plugins on its nodes."""


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
