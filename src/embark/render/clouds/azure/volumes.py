"""Storage on Azure: the run's containers, and NetApp Files or Managed Lustre."""

from __future__ import annotations

from typing import Any

from embark.render.file import File
from embark.render.job import Job
from embark.render.location import Bucket, buckets, places, site_of
from embark.render.shell_text import (
    PRELUDE,
    Shell,
    command,
    needed,
    output_of,
    run,
    script,
    setting,
    unless,
    variable,
)
from embark.render.volumes import apply_filled, bucket_files, capacity_gib, speed, volume_files, volume_of

SUBNET_PREFIX = "10.225.0.0/24"
"""In AKS's own network, 10.224.0.0/12, beside its machines' 10.224.0.0/16."""
SHARE = "data"


def render_volumes(job: Job) -> list[File]:
    """`storage.sh` makes what the run needs; with `place.volume` also the volume, its claim and the copy."""
    files = [File("storage.sh", _script(job), is_executable=True)]
    volume = volume_of(job)
    if volume:
        source = lustre_source() if "lustre" in volume.name else netapp_source()
        files += volume_files(job, source, capacity_gib(volume), filled_by="storage.sh puts its address in.")
    return files + bucket_mount(job)


def bucket_mount(job: Job) -> list[File]:
    """BlobFuse."""
    read = [place for place in places(job) if place.scheme == "az" and not place.is_written]
    if job.spec.place.volume or not read:
        return []
    bucket, account = read[0], job.spec.place.storage_account
    source = {"mountOptions": ["-o allow_other", "--use-attr-cache=true", "--cancel-list-on-mount-seconds=10"],
              "csi": {"driver": "blob.csi.azure.com", "volumeHandle": f"{account}_{bucket.name}", "readOnly": True,
                      "volumeAttributes": {"storageAccount": account, "containerName": bucket.name,
                                           "protocol": "fuse2", "AzureStorageAuthType": "msi"}}}
    return bucket_files(job, source, bucket.uri, needs="It needs az aks update --enable-blob-driver.")


def storage_account_setting(job: Job) -> str:
    """The account of the run's containers: the spec's, or one that must be named."""
    account = job.spec.place.storage_account
    what = "a name for the storage account, 3 to 24 small letters and digits"
    return setting("STORAGE_ACCOUNT", account) if account else needed("STORAGE_ACCOUNT", what)


def netapp_source() -> dict[str, Any]:
    # Several connections: one alone carries a fraction of what the volume can.
    return {"mountOptions": ["vers=3", "nconnect=8", "rsize=262144", "wsize=262144", "hard"],
            "nfs": {"server": "10.225.0.4", "path": f"/{SHARE}"}}


def lustre_source() -> dict[str, Any]:
    return {"mountOptions": ["noatime", "flock"],
            "csi": {"driver": "azurelustre.csi.azure.com", "volumeHandle": "lustre#10.225.0.4#lustrefs",
                    "volumeAttributes": {"mgs-ip-address": "10.225.0.4", "fs-name": "lustrefs"}}}


def _script(job: Job) -> str:
    site, volume = site_of(job), volume_of(job)
    used = [bucket for bucket in buckets(job) if bucket.scheme == "az"]
    settings = [setting("RESOURCE_GROUP", site.cluster), setting("CLUSTER", site.cluster),
                setting("LOCATION", site.region)]
    if used:
        settings.append(storage_account_setting(job))
    parts = [
        "\n".join(settings), PRELUDE, 'cd "$(dirname "$0")"',
        run("az", "group", "create", "--name", variable("RESOURCE_GROUP"), "--location", variable("LOCATION")),
    ]
    if used:
        parts.append(_account())
        parts += [_container(bucket) for bucket in used]
        parts.append(_own_role())
    if volume:
        size_gib = capacity_gib(volume)
        parts.append(f"# {speed(volume, size_gib)} More reads faster.\n{setting('CAPACITY_GIB', str(size_gib))}")
        parts.append(_subnet("Microsoft.NetApp/volumes" if "netapp" in volume.name else ""))
        parts += _lustre(job) if "lustre" in volume.name else _netapp(job)
    return script("Makes the run's storage where it is not there yet. Safe to repeat.", *parts)


def _account() -> str:
    name = ("--name", variable("STORAGE_ACCOUNT"))
    return unless(
        command("az", "storage", "account", "show", *name),
        run("az", "storage", "account", "create", *name, "--resource-group", variable("RESOURCE_GROUP"),
            "--location", variable("LOCATION"), "--sku", "Standard_LRS", "--kind", "StorageV2",
            "--allow-blob-public-access", "false", "--allow-shared-key-access", "false",
            "--min-tls-version", "TLS1_2"))


def _container(bucket: Bucket) -> str:
    return run("az", "storage", "container-rm", "create", "--storage-account", variable("STORAGE_ACCOUNT"),
               "--resource-group", variable("RESOURCE_GROUP"), "--name", bucket.name)


def _own_role() -> str:
    account = output_of("az", "storage", "account", "show", "--name", variable("STORAGE_ACCOUNT"), "--query", "id",
                        "--output", "tsv")
    user = output_of("az", "ad", "signed-in-user", "show", "--query", "id", "--output", "tsv")
    return "# You may upload data: owning the account does not yet allow that.\n" + run(
        "az", "role", "assignment", "create", "--role", "Storage Blob Data Contributor", "--assignee-object-id", user,
        "--assignee-principal-type", "User", "--scope", account)


def _subnet(delegation: str) -> str:
    node_group = output_of("az", "aks", "show", "--resource-group", variable("RESOURCE_GROUP"), "--name",
                           variable("CLUSTER"), "--query", "nodeResourceGroup", "--output", "tsv")
    vnet = output_of("az", "network", "vnet", "list", "--resource-group", variable("NODE_GROUP"),
                     "--query", "[0].name", "--output", "tsv")
    where = ("--resource-group", variable("NODE_GROUP"), "--vnet-name", variable("VNET"), "--name", "embark-storage")
    delegated = ["--delegations", delegation] if delegation else []
    return f"""\
# A subnet of its own in the cluster's network.
NODE_GROUP=none VNET=none
if [ "$DRY_RUN" = 0 ]; then
  NODE_GROUP={node_group}
  VNET={vnet}
fi
""" + unless(command("az", "network", "vnet", "subnet", "show", *where),
             run("az", "network", "vnet", "subnet", "create", *where, "--address-prefixes", SUBNET_PREFIX, *delegated))


def _netapp(job: Job) -> list[str]:
    level = job.spec.place.volume.removeprefix("azure-netapp-").capitalize()
    account = ("--resource-group", variable("RESOURCE_GROUP"), "--account-name", "embark")
    volume = (*account, "--pool-name", "embark", "--name", job.claim_name)
    subnet = output_of("az", "network", "vnet", "subnet", "show", "--resource-group", variable("NODE_GROUP"),
                       "--vnet-name", variable("VNET"), "--name", "embark-storage", "--query", "id", "--output", "tsv")
    address = output_of("az", "netappfiles", "volume", "show", *volume, "--query", "mountTargets[0].ipAddress",
                        "--output", "tsv")
    return [
        run("az", "provider", "register", "--namespace", "Microsoft.NetApp", "--wait"),
        unless(command("az", "netappfiles", "account", "show", *account),
               run("az", "netappfiles", "account", "create", *account, "--location", variable("LOCATION"))),
        unless(command("az", "netappfiles", "pool", "show", *account, "--name", "embark"),
               run("az", "netappfiles", "pool", "create", *account, "--name", "embark", "--location",
                   variable("LOCATION"), "--service-level", level,
                   "--size", Shell('"$(((CAPACITY_GIB + 1023) / 1024))"'))),
        unless(command("az", "netappfiles", "volume", "show", *volume),
               run("az", "netappfiles", "volume", "create", *volume, "--location", variable("LOCATION"),
                   "--service-level", level, "--usage-threshold", variable("CAPACITY_GIB"), "--file-path", SHARE,
                   "--protocol-types", "NFSv3", "--network-features", "Standard", "--subnet", subnet)),
        f'if [ "$DRY_RUN" = 0 ]; then ADDRESS={address}; fi\n'
        + apply_filled('"{\\"spec\\":{\\"nfs\\":{\\"server\\":\\"$ADDRESS\\"}}}"'),
    ]


def _lustre(job: Job) -> list[str]:
    rate = job.spec.place.volume.rpartition("-")[2]
    where = ("--resource-group", variable("RESOURCE_GROUP"), "--name", job.claim_name)
    subnet = output_of("az", "network", "vnet", "subnet", "show", "--resource-group", variable("NODE_GROUP"),
                       "--vnet-name", variable("VNET"), "--name", "embark-storage", "--query", "id", "--output", "tsv")
    address = output_of("az", "amlfs", "show", *where, "--query", "clientInfo.mgsAddress", "--output", "tsv")
    patch = ('"{\\"spec\\":{\\"csi\\":{\\"volumeHandle\\":\\"lustre#$ADDRESS#lustrefs\\",\\"volumeAttributes\\":'
             '{\\"mgs-ip-address\\":\\"$ADDRESS\\"}}}}"')
    return [
        run("az", "extension", "add", "--name", "amlfs", "--upgrade"),
        unless(command("az", "amlfs", "show", *where),
               run("az", "amlfs", "create", *where, "--location", variable("LOCATION"),
                   "--sku", f"AMLFS-Durable-Premium-{rate}",
                   "--storage-capacity", Shell('"$(((CAPACITY_GIB + 1023) / 1024))"'),
                   "--zones", f"[{site_of(job).zone}]", "--filesystem-subnet", subnet,
                   "--maintenance-window", "{dayOfWeek:Sunday,timeOfDayUtc:'03:00'}")),
        f'if [ "$DRY_RUN" = 0 ]; then ADDRESS={address}; fi\n' + apply_filled(patch),
    ]
