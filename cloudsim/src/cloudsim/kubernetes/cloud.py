"""The interface between a cluster and its cloud: identities of pods, access, images and volumes."""

from collections.abc import Mapping
from dataclasses import field
from pathlib import Path
from typing import Protocol

from embark.values import JsonMap, frozen

Manifest = JsonMap


@frozen
class VolumeFacts:
    """A file system behind a PersistentVolume, as a node would mount it."""

    folder: Path  # The folder of this machine with the volume's content.
    uid: int = 0  # Owner of the volume's root.
    gid: int = 0
    mode: int = 0o755
    takes_fs_group: bool = False  # The kubelet changes the root's group to the pod's fsGroup.
    fetches: bool = False  # Files of a bucket take their space when they are first read.


@frozen
class NodePool:
    """The machines of one kind in a cluster."""

    name: str
    machine_type: str
    zone: str
    num_nodes: int
    allocatable: Mapping[str, str]  # Resources that a node leaves to pods, such as `{"cpu": "1930m", "memory": "7Gi"}`.
    labels: Mapping[str, str] = field(default_factory=dict)
    taints: tuple[Mapping[str, str], ...] = ()  # Each has `key`, `value` and `effect`.
    max_nodes: int = 0  # Limit of the cluster autoscaler; 0 without one.
    devices_after: Mapping[str, str] = field(default_factory=dict)
    """Maps a resource to its device plugin, such as `{"nvidia.com/gpu": "nvidia-device-plugin-daemonset"}`; nodes do
    not offer the resource before a DaemonSet of that name exists."""
    join_error: str = ""  # Why its machines never become nodes; empty if they do.


class ClusterCloud(Protocol):
    """The cloud of a cluster. Texts that it returns are errors in the words of the real event or log."""

    def pull_error(self, image: str, pool: NodePool, namespace: str) -> str:
        """Return why a node of this pool cannot pull an image, or an empty text."""
        ...

    def access_error(self, uri: str, *, write: bool, namespace: str, service_account: Manifest, pod: Manifest) -> str:
        """Return why a pod of this service account cannot use an object store's address, or an empty text."""
        ...

    def volume(self, volume: Manifest, pool: NodePool) -> VolumeFacts | str:
        """Return the file system of a PersistentVolume on a node of this pool, or why it cannot be mounted there."""
        ...

    def make_disk(self, name: str, driver: str, gib: float) -> str:
        """Create the disk of a claim, which costs money; return why it cannot be created, or an empty text."""
        ...

    def drop_disk(self, name: str) -> None: ...

    def on_pool_change(self, pool: NodePool, num_nodes: int) -> str:
        """Take note that the autoscaler wants this many machines; return an error such as missing quota, or an empty
        text."""
        ...
