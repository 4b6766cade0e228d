"""AKS's side of a cluster: images, identities of pods, volumes, and the autoscaler's machines."""

from collections.abc import Iterator
from typing import Any

from cloudsim.azure.arm import POOL, Subscription
from cloudsim.azure.facts import FACTS
from cloudsim.azure.file_systems import LUSTRE, VOLUME
from cloudsim.azure.identities import AUDIENCE, IDENTITY
from cloudsim.azure.storage import ACCOUNT, pull_error
from cloudsim.kubernetes.cloud import Manifest, NodePool, VolumeFacts
from cloudsim.state import Resource
from embark.values import JsonDict

LABEL = "azure.workload.identity/use"
ANNOTATION = "azure.workload.identity/client-id"
ACCOUNT_VARIABLE = "AZURE_STORAGE_ACCOUNT_NAME"


class AksCloud:
    """The cloud of one AKS cluster."""

    def __init__(self, azure: Subscription, resource: Resource) -> None:
        self.azure, self.resource = azure, resource
        self._disks: set[str] = set()

    @property
    def body(self) -> JsonDict:
        found: JsonDict = self.resource.attributes["body"]
        return found

    def pull_error(self, image: str, pool: NodePool, namespace: str) -> str:
        return pull_error(self.azure, image, self.body["identityProfile"]["kubeletidentity"]["objectId"])

    def access_error(self, uri: str, *, write: bool, namespace: str, service_account: Manifest, pod: Manifest) -> str:
        scheme, _, rest = uri.partition("://")
        if scheme not in ("az", "abfs", "abfss"):
            return f"{uri}: no credentials for {scheme}:// in a pod of AKS"
        account = next((value for name, value in _environment(pod) if name == ACCOUNT_VARIABLE and value), "")
        if not account:
            return f"{uri}: Generic MicrosoftAzure error: Account must be specified: set {ACCOUNT_VARIABLE}"
        name = str(service_account["metadata"]["name"])
        principal, error = self._identity(namespace, name, service_account, pod)
        return error or blob_error(self.azure, account, rest.partition("/")[0], principal, write=write)

    def _identity(self, namespace: str, name: str, service_account: Manifest, pod: Manifest) -> tuple[str, str]:
        """Return the principal that a pod becomes by workload identity, and an error if it becomes none."""
        if str((pod.get("metadata", {}).get("labels") or {}).get(LABEL)) != "true":
            return "", (f"Generic MicrosoftAzure error: Error performing token request: http://169.254.169.254/metadata/"
                        f"identity/oauth2/token: 400 Bad Request: Identity not found (the pod has no label {LABEL}: "
                        "'true')")
        if not (self.body["securityProfile"] or {}).get("workloadIdentity"):
            return "", "Identity not found: the cluster was made without --enable-workload-identity"
        client = str((service_account["metadata"].get("annotations") or {}).get(ANNOTATION, ""))
        if not client:
            return "", f"Identity not found: the service account {namespace}/{name} has no annotation {ANNOTATION}"
        found = next((one for one in self.azure.resources.of_kind(IDENTITY)
                      if one.attributes["body"]["clientId"] == client), None)
        if found is None:
            return "", f"AADSTS700016: Application with identifier '{client}' was not found in the directory"
        subject, issuer = f"system:serviceaccount:{namespace}:{name}", self.body["oidcIssuerProfile"]["issuerUrl"]
        trusted = [one.attributes["body"] for one in self.azure.below(found)]
        if not any(one["subject"] == subject and one["issuer"] == issuer and AUDIENCE in one["audiences"]
                   for one in trusted):
            return "", (f"AADSTS700213: No matching federated identity record found for presented assertion subject "
                        f"'{subject}' of issuer '{issuer}'")
        return str(found.attributes["body"]["principalId"]), ""

    def volume(self, volume: Manifest, pool: NodePool) -> VolumeFacts | str:
        spec = volume["spec"]
        if "nfs" in spec:
            return self._netapp(str(spec["nfs"].get("server")), str(spec["nfs"].get("path")),
                                " ".join(spec.get("mountOptions") or ()))
        csi = spec.get("csi") or {}
        attributes = csi.get("volumeAttributes") or {}
        if csi.get("driver") == "azurelustre.csi.azure.com":
            return self._lustre(str(attributes.get("mgs-ip-address")))
        if csi.get("driver") == "blob.csi.azure.com":
            return self._blob(str(attributes.get("storageAccount")), str(attributes.get("containerName")))
        return f"MountVolume.SetUp failed: {csi.get('driver')}: not a file system that this account has"

    def _netapp(self, server: str, path: str, options: str) -> VolumeFacts | str:
        found = next((one for one in self.azure.resources.of_kind(VOLUME)
                      if one.attributes["body"]["mountTargets"][0]["ipAddress"] == server), None)
        if found is None or not self._is_near(found.attributes["body"]["subnetId"]):
            return f"MountVolume.SetUp failed: mount.nfs: Connection timed out for {server}:{path}"
        body = found.attributes["body"]
        if path != f"/{body['creationToken']}":
            return (f"MountVolume.SetUp failed: mount.nfs: mounting {server}:{path} failed, reason given by server: No "
                    "such file or directory")
        if "vers=3" in options.replace("nfsvers", "vers") and "NFSv3" not in body["protocolTypes"]:
            return f"MountVolume.SetUp failed: mount.nfs: Protocol not supported for {server}:{path}"
        # The in-tree NFS plugin leaves owner and mode of the server's files as they are.
        return VolumeFacts(self._folder(found), mode=int(body["unixPermissions"], 8))

    def _lustre(self, server: str) -> VolumeFacts | str:
        found = next((one for one in self.azure.resources.of_kind(LUSTRE)
                      if one.attributes["body"]["clientInfo"]["mgsAddress"] == server), None)
        if found is None or not self.azure.resources.is_ready(found):
            return f"MountVolume.SetUp failed: mount.lustre: mount {server}@tcp:/lustrefs failed: Connection timed out"
        # The driver's CSIDriver object has fsGroupPolicy File.
        return VolumeFacts(self._folder(found), takes_fs_group=True)

    def _blob(self, account: str, container: str) -> VolumeFacts | str:
        kubelet = self.body["identityProfile"]["kubeletidentity"]["objectId"]
        error = blob_error(self.azure, account, container, kubelet, write=False)
        return f"MountVolume.SetUp failed: {error}" if error else VolumeFacts(
            self.azure.account.folder / "blobs" / account / container, mode=0o777)

    def _is_near(self, subnet_id: str) -> bool:
        """Return whether a subnet is in the cluster's own network; peering is not modelled."""
        return f"/resourceGroups/{self.body['nodeResourceGroup']}/" in subnet_id

    def _folder(self, resource: Resource) -> Any:
        folder = self.azure.account.folder / "volumes" / resource.name.replace("/", "_")
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def make_disk(self, name: str, driver: str, gib: float) -> str:
        self._disks.add(name)
        return ""

    def drop_disk(self, name: str) -> None:
        """Forget a disk. Disks are in the cluster's own resource group and are deleted with it."""
        self._disks.discard(name)

    def on_pool_change(self, pool: NodePool, num_nodes: int) -> str:
        found = self.azure.find(POOL, *self.resource.name.split("/"), pool.name)
        if found is None:
            return f"the pool {pool.name} is gone"
        body = found.attributes["body"]
        if not body["enableAutoScaling"] or num_nodes > body["maxCount"]:
            return "max node group size reached"
        kind = self.azure.machine_type(body["vmSize"], found.location)
        error = self.azure.quota_error(kind, found.location, num_nodes - body["count"],
                                       is_spot=body["scaleSetPriority"] == "Spot")
        if not error:
            body["count"], found.is_paid = num_nodes, num_nodes > 0
        return error


def blob_error(azure: Subscription, account: str, container: str, principal: str, *, write: bool) -> str:
    """Return why an identity cannot use a container, or an empty text."""
    found = azure.global_name(ACCOUNT, account)
    if found is None:
        return (f"error sending request for url (https://{account}.blob.core.windows.net/{container}): dns error: "
                "failed to lookup address information: Name or service not known")
    roles = FACTS["roles"]["blob_write" if write else "blob_read"]
    if not azure.may(principal, roles, f"{azure.id_of(found)}/blobServices/default/containers/{container}"):
        return ("403 Forbidden: AuthorizationPermissionMismatch: This request is not authorized to perform this "
                f"operation using this permission: {'write to' if write else 'read'} {account}/{container}")
    if container not in found.attributes["body"]["containers"]:
        return f"404 Not Found: ContainerNotFound: The specified container does not exist: {account}/{container}"
    return ""


def _environment(pod: Manifest) -> Iterator[tuple[str, str]]:
    for container in (pod.get("spec") or {}).get("containers") or ():
        for row in container.get("env") or ():
            yield str(row.get("name")), str(row.get("value") or "")
