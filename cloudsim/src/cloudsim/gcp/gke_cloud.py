"""GKE's side of a cluster: images, object stores, volumes and quota."""

from cloudsim.gcp.compute import check_quota
from cloudsim.gcp.project import Project
from cloudsim.gcp.registry import pull_error
from cloudsim.gcp.storage import bucket_folder, volume_folder
from cloudsim.kubernetes.cloud import Manifest, NodePool, VolumeFacts
from cloudsim.state import Resource
from embark.kubernetes.objects import at

FILE_SYSTEMS = {"filestore.csi.storage.gke.io": "filestore", "lustre.csi.storage.gke.io": "lustre"}


class GkeCloud:
    """The cloud of one GKE cluster."""

    def __init__(self, project: Project, cluster: Resource) -> None:
        self._project = project
        self._cluster = cluster

    def pull_error(self, image: str, pool: NodePool, namespace: str) -> str:
        return pull_error(self._project, image, self._pool(pool.name).attributes["service_account"])

    def access_error(self, uri: str, *, write: bool, namespace: str, service_account: Manifest, pod: Manifest) -> str:
        if not uri.startswith("gs://"):
            return f"{uri}: the credentials of this cluster are Google's"
        name = uri.removeprefix("gs://").partition("/")[0]
        if self._project.resources.find("bucket", name) is None:
            return f"404 from Cloud Storage: The specified bucket does not exist. ({uri})"
        pool = next((one for one in self._pools() if str(at(pod, "spec.nodeName") or "")
                     .startswith(f"{one.attributes['pool']}-")), None)
        what, resource = "write" if write else "read", f"buckets/{name}"
        for member in self._members(namespace, service_account, pool):
            if self._project.allows(member, what, resource):
                below = bucket_folder(self._project, name) / uri.removeprefix("gs://").partition("/")[2]
                return "" if write or below.exists() else f"{uri}: no such object"
        verb = "storage.objects.create" if write else "storage.objects.get"
        who = self._members(namespace, service_account, pool)[0]
        return (f"403 from Cloud Storage: Caller ({who}) does not have {verb} access to the Google Cloud Storage "
                f"object. Permission '{verb}' denied on resource (or it may not exist). ({uri})")

    def volume(self, volume: Manifest, pool: NodePool) -> VolumeFacts | str:
        csi = at(volume, "spec.csi") or {}
        kind = FILE_SYSTEMS.get(str(csi.get("driver")))
        if kind is None:
            return f"MountVolume.MountDevice failed: driver {csi.get('driver')} mounts no file system of this account"
        parts = str(csi.get("volumeHandle")).split("/")
        location, name = (parts[1], parts[2]) if kind == "filestore" and len(parts) == 4 else (
            (parts[1], parts[2]) if kind == "lustre" and len(parts) == 3 else ("", ""))
        found = self._project.resources.find(kind, f"{location}/{name}")
        if found is None:
            return (f"MountVolume.MountDevice failed: rpc error: code = NotFound: {kind} instance "
                    f"{csi.get('volumeHandle')} was not found")
        given = csi.get("volumeAttributes") or {}
        share = given.get("volume") if kind == "filestore" else given.get("filesystem")
        if not self._project.resources.is_ready(found):
            return f"MountVolume.MountDevice failed: {kind} instance {name} is being created"
        if given.get("ip") != found.attributes["address"] or share != found.attributes["share"]:
            return (f"MountVolume.MountDevice failed: rpc error: code = DeadlineExceeded: mount of "
                    f"{given.get('ip')}:/{share} timed out")
        if found.attributes["network"] != self._cluster.attributes["network"]:
            return (f"MountVolume.MountDevice failed: rpc error: code = DeadlineExceeded: {given.get('ip')} is in "
                    f"network {found.attributes['network']}, the node is in {self._cluster.attributes['network']}")
        folder = volume_folder(self._project, found)
        folder.mkdir(parents=True, exist_ok=True)
        # Both drivers give the root of a volume to the pod's fsGroup themselves.
        return VolumeFacts(folder, takes_fs_group=True)

    def make_disk(self, name: str, driver: str, gib: float) -> str:
        self._project.resources.add("persistent disk", name, is_paid=True)
        return ""

    def drop_disk(self, name: str) -> None:
        self._project.resources.remove("persistent disk", name)

    def on_pool_change(self, pool: NodePool, num_nodes: int) -> str:
        found = self._pool(pool.name)
        metrics = found.attributes["metrics"]
        found.attributes["quota"] = {}
        short = check_quota(self._project, metrics, pool.zone.rpartition("-")[0], num_nodes)
        if not short:
            found.attributes["quota"] = {metric: each * num_nodes for metric, each in metrics.items()}
            found.is_paid = num_nodes > 0
        return short and f"Google Compute Engine: {short}"

    def _pools(self) -> list[Resource]:
        return [one for one in self._project.resources.of_kind("node pool") if self._cluster.key in one.uses]

    def _pool(self, name: str) -> Resource:
        return next(one for one in self._pools() if one.attributes["pool"] == name)

    def _members(self, namespace: str, account: Manifest, pool: Resource | None) -> list[str]:
        """Return the IAM members that a pod may act as: itself, a service account, or its node."""
        workload_pool = self._cluster.attributes["workload_pool"]
        if not workload_pool or (pool is not None and not pool.attributes["has_metadata_server"]):
            return [f"serviceAccount:{self._project.compute_account}"]
        metadata = account.get("metadata") or {}
        name = str(metadata.get("name") or "default")
        found = [f"principal://iam.googleapis.com/projects/{self._project.number}/locations/global/"
                 f"workloadIdentityPools/{workload_pool}/subject/ns/{namespace}/sa/{name}"]
        other = (metadata.get("annotations") or {}).get("iam.gke.io/gcp-service-account")
        held = self._project.policies.get(f"serviceAccounts/{other}", set())
        if other and ("roles/iam.workloadIdentityUser", f"serviceAccount:{workload_pool}[{namespace}/{name}]") in held:
            found.insert(0, f"serviceAccount:{other}")
        return found
