"""What a cluster asks its cloud: who a pod is, what it may read, which image a node may pull, what a volume is."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

Manifest = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class VolumeFacts:
    """A file system behind a PersistentVolume, as a node would mount it."""

    folder: Path  # Its content, on this machine.
    uid: int = 0  # Owner of its root.
    gid: int = 0
    mode: int = 0o755
    takes_fs_group: bool = False  # The kubelet gives the pod's fsGroup to it: by driver, access mode and file system.


@dataclass(frozen=True, slots=True)
class NodePool:
    """Machines of one kind in a cluster."""

    name: str
    machine_type: str
    zone: str
    num_nodes: int
    allocatable: Mapping[str, str]  # What pods can have of one: `{"cpu": "1930m", "memory": "7Gi"}`.
    labels: Mapping[str, str] = field(default_factory=dict)
    taints: tuple[Mapping[str, str], ...] = ()  # `{"key":, "value":, "effect":}`.
    max_nodes: int = 0  # With a cluster autoscaler; 0 without one.
    devices_after: Mapping[str, str] = field(default_factory=dict)
    """Resource to the DaemonSet that makes the kubelet know it: `{"nvidia.com/gpu": "nvidia-device-plugin-daemonset"}`;
    until a DaemonSet of that name is there, nodes do not offer the resource."""


class ClusterCloud(Protocol):
    """The cloud of a cluster. A text that is returned says why not, as the real event or log would."""

    def pull_error(self, image: str, pool: NodePool, namespace: str) -> str:
        """Why a node of this pool cannot pull this image; empty if it can."""
        ...

    def access_error(self, uri: str, *, write: bool, namespace: str, service_account: Manifest, pod: Manifest) -> str:
        """Why a pod of this service account cannot use an object store's address; empty if it can."""
        ...

    def volume(self, volume: Manifest, pool: NodePool) -> VolumeFacts | str:
        """What a PersistentVolume is on a node of this pool, or why it cannot be mounted there."""
        ...

    def on_pool_change(self, pool: NodePool, num_nodes: int) -> str:
        """The autoscaler wants this many machines: an error such as missing quota, or empty."""
        ...
