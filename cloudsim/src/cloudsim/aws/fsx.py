"""FSx for Lustre: file systems, their links to S3, and the tasks that import objects."""

from pathlib import Path
from typing import Any
from uuid import uuid4

from cloudsim.aws.account import NUMBER, AwsAccount, facts
from cloudsim.aws.api import ApiError, Parameters, operation
from cloudsim.state import Resource
from embark.values import JsonDict

FILE_SYSTEM, LINK, TASK = "FSx file system", "FSx data repository association", "FSx data repository task"
# Seconds of the account's clock. Scripts look every 15 s; one that does not wait comes too early.
CREATE_S, LINK_S, TASK_S, DELETE_S = 60.0, 30.0, 30.0, 30.0
LNET_PORT = 988


@operation("fsx.CreateFileSystem")
def create_file_system(account: AwsAccount, region: str, given: Parameters) -> JsonDict:
    token = given.get("ClientRequestToken")
    for one in file_systems(account, region):
        if token and one.attributes["token"] == token:
            return {"FileSystem": _described(account, one)}
    if given["FileSystemType"] != "LUSTRE":
        raise ApiError("BadRequest", f"{given['FileSystemType']} is not part of this rehearsal; use LUSTRE")
    lustre = dict(given.get("LustreConfiguration") or {})
    _check_lustre(lustre, given.get("StorageCapacity"))
    subnet, groups = _check_network(account, region, given)
    name = f"fs-0{uuid4().hex[:16]}"
    lustre["MountName"] = "fsx" if lustre.get("DeploymentType", "SCRATCH_1") == "SCRATCH_1" else uuid4().hex[:8]
    made = account.resources.add(
        FILE_SYSTEM, name, location=region, takes_s=CREATE_S, uses={("subnet", subnet.id)}, is_paid=True, token=token,
        vpc=subnet.vpc_id, groups=[one.id for one in groups], deleted_at=None, body={
            "FileSystemId": name, "OwnerId": NUMBER, "FileSystemType": "LUSTRE", "StorageType": "SSD",
            "StorageCapacity": given["StorageCapacity"], "VpcId": subnet.vpc_id, "SubnetIds": given["SubnetIds"],
            "DNSName": f"{name}.fsx.{region}.amazonaws.com", "Tags": given.get("Tags") or [],
            "FileSystemTypeVersion": given.get("FileSystemTypeVersion", "2.15"), "LustreConfiguration": lustre,
            "ResourceARN": f"arn:aws:fsx:{region}:{NUMBER}:file-system/{name}"})
    return {"FileSystem": _described(account, made)}


@operation("fsx.DescribeFileSystems")
def describe_file_systems(account: AwsAccount, region: str, given: Parameters) -> JsonDict:
    ids = given.get("FileSystemIds") or [one.name for one in file_systems(account, region)]
    return {"FileSystems": [_described(account, _file_system(account, region, one)) for one in ids]}


@operation("fsx.DeleteFileSystem")
def delete_file_system(account: AwsAccount, region: str, given: Parameters) -> JsonDict:
    """Begin a deletion. The network interfaces stay in their subnet until it is complete."""
    found = _file_system(account, region, given["FileSystemId"])
    if not account.resources.is_ready(found):
        raise ApiError("BadRequest", f"The file system {found.name} is being created and cannot be deleted.")
    found.attributes["deleted_at"] = account.clock.now + DELETE_S
    found.is_paid = False
    return {"FileSystemId": found.name, "Lifecycle": "DELETING"}


@operation("fsx.CreateDataRepositoryAssociation")
def create_association(account: AwsAccount, region: str, given: Parameters) -> JsonDict:
    file_system = _available(account, region, given["FileSystemId"])
    if file_system.attributes["body"]["LustreConfiguration"].get("DeploymentType") in (None, "SCRATCH_1"):
        raise ApiError("UnsupportedOperation", "SCRATCH_1 file systems have no data repository associations.")
    bucket, path = given["DataRepositoryPath"].removeprefix("s3://").partition("/")[0], given.get("FileSystemPath", "")
    found = account.backends("s3")["aws"].buckets.get(bucket)
    if not given["DataRepositoryPath"].startswith("s3://") or found is None:
        raise ApiError("BadRequest", f"The S3 bucket of {given['DataRepositoryPath']} does not exist or cannot be "
                                     "accessed.")
    if found.region_name != region:
        raise ApiError("BadRequest", f"The S3 bucket {bucket} is in {found.region_name}, the file system in {region}.")
    if not path.startswith("/"):
        raise ApiError("BadRequest", f"FileSystemPath must be an absolute path: '{path}'")
    for other in _links(account, file_system.name):
        known = str(other.attributes["body"]["FileSystemPath"])
        if f"{known}/".startswith(f"{path}/") or f"{path}/".startswith(f"{known}/"):
            raise ApiError("BadRequest", f"FileSystemPath {path} overlaps with {known} of {other.name}.")
    name = f"dra-0{uuid4().hex[:16]}"
    made = account.resources.add(
        LINK, name, location=region, takes_s=LINK_S, file_system=file_system.name, deleted_at=None,
        body={"AssociationId": name, "FileSystemId": file_system.name, "FileSystemPath": path,
              "S3": given.get("S3", {}), "DataRepositoryPath": given["DataRepositoryPath"],
              "Tags": given.get("Tags") or [],
              "BatchImportMetaDataOnCreate": bool(given.get("BatchImportMetaDataOnCreate"))})
    if given.get("BatchImportMetaDataOnCreate"):
        _add_task(account, region, file_system.name, [given["DataRepositoryPath"]], LINK_S + TASK_S)
    return {"Association": _described(account, made)}


@operation("fsx.DescribeDataRepositoryAssociations")
def describe_associations(account: AwsAccount, region: str, given: Parameters) -> JsonDict:
    _forget_deleted(account)
    wanted = {row["Name"]: row["Values"] for row in given.get("Filters") or ()}
    found = [one for one in account.resources.of_kind(LINK) if one.location == region
             and one.attributes["file_system"] in wanted.get("file-system-id", [one.attributes["file_system"]])]
    for name in given.get("AssociationIds") or ():
        if name not in {one.name for one in found}:
            raise ApiError("DataRepositoryAssociationNotFound", f"Data repository association {name} does not exist.")
    names = given.get("AssociationIds") or [one.name for one in found]
    return {"Associations": [_described(account, one) for one in found if one.name in names]}


@operation("fsx.DeleteDataRepositoryAssociation")
def delete_association(account: AwsAccount, region: str, given: Parameters) -> JsonDict:
    name = given["AssociationId"]
    describe_associations(account, region, {"AssociationIds": [name]})
    found = account.resources.find(LINK, name)
    assert found is not None
    found.attributes["deleted_at"] = account.clock.now + DELETE_S
    return {"AssociationId": name, "Lifecycle": "DELETING",
            "DeleteDataInFileSystem": bool(given.get("DeleteDataInFileSystem"))}


@operation("fsx.CreateDataRepositoryTask")
def create_task(account: AwsAccount, region: str, given: Parameters) -> JsonDict:
    file_system = _available(account, region, given["FileSystemId"])
    if any(not account.resources.is_ready(one) for one in account.resources.of_kind(TASK)
           if one.attributes["file_system"] == file_system.name):
        raise ApiError("DataRepositoryTaskExecuting", "An existing data repository task is currently executing on "
                                                      f"{file_system.name}. Wait until it has completed.")
    if given["Type"] != "IMPORT_METADATA_FROM_REPOSITORY":
        raise ApiError("BadRequest", f"{given['Type']} is not part of this rehearsal")
    if not any(account.resources.is_ready(one) for one in _links(account, file_system.name)):
        raise ApiError("BadRequest", f"The file system {file_system.name} has no data repository association that is "
                                     "AVAILABLE.")
    made = _add_task(account, region, file_system.name, list(given.get("Paths") or ()), TASK_S)
    return {"DataRepositoryTask": _described(account, made)}


@operation("fsx.DescribeDataRepositoryTasks")
def describe_tasks(account: AwsAccount, region: str, given: Parameters) -> JsonDict:
    found = [one for one in account.resources.of_kind(TASK) if one.location == region]
    for name in given.get("TaskIds") or ():
        if name not in {one.name for one in found}:
            raise ApiError("DataRepositoryTaskNotFound", f"Data repository task {name} does not exist.")
    wanted = {row["Name"]: row["Values"] for row in given.get("Filters") or ()}
    names = given.get("TaskIds") or [one.name for one in found if one.attributes["file_system"] in
                                     wanted.get("file-system-id", [one.attributes["file_system"]])]
    return {"DataRepositoryTasks": [_described(account, one) for one in found if one.name in names]}


def file_systems(account: AwsAccount, region: str = "") -> list[Resource]:
    """List the file systems that exist, including those being deleted."""
    _forget_deleted(account)
    return [one for one in account.resources.of_kind(FILE_SYSTEM) if region in ("", one.location)]


def folder_of(account: AwsAccount, file_system: Resource) -> Path:
    """Return the folder with the content that a node sees, including what finished tasks have imported."""
    for task in account.resources.of_kind(TASK):
        if task.attributes["file_system"] == file_system.name and account.resources.is_ready(task):
            _settle(account, task)
    folder = account.folder / "fsx" / file_system.name
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _check_lustre(lustre: JsonDict, capacity_gib: int | None) -> None:
    kind, throughput = lustre.get("DeploymentType", "SCRATCH_1"), lustre.get("PerUnitStorageThroughput")
    speeds = facts()["fsx"]["throughputs"].get(kind, [])
    if speeds and throughput not in speeds:
        raise ApiError("BadRequest", f"PerUnitStorageThroughput is required for {kind}: one of {speeds}, "
                                     f"not {throughput}")
    if not speeds and throughput is not None:
        raise ApiError("BadRequest", f"PerUnitStorageThroughput is not supported for {kind}")
    if kind == "PERSISTENT_2" and {"ImportPath", "ExportPath"} & set(lustre):
        raise ApiError("BadRequest", "ImportPath and ExportPath are not supported for PERSISTENT_2; create a data "
                                     "repository association")
    if capacity_gib != 1200 and (not capacity_gib or capacity_gib < 0 or capacity_gib % 2400):
        raise ApiError("BadRequest", f"Invalid storage capacity: {capacity_gib}. Specify 1200, 2400, or a multiple of "
                                     "2400 GiB")


def _check_network(account: AwsAccount, region: str, given: Parameters) -> tuple[Any, list[Any]]:
    ec2 = account.backends("ec2")[region]
    if len(given["SubnetIds"]) != 1:
        raise ApiError("InvalidNetworkSettings", "A Lustre file system is in exactly one subnet.")
    subnets = {one.id: one for by_zone in ec2.subnets.values() for one in by_zone.values()}
    subnet = subnets.get(given["SubnetIds"][0])
    if subnet is None:
        raise ApiError("InvalidNetworkSettings", f"The subnet ID '{given['SubnetIds'][0]}' does not exist")
    known = {one.id: one for by_vpc in ec2.groups.values() for one in by_vpc.values()}
    groups = []
    for name in given.get("SecurityGroupIds") or ():
        if name not in known or known[name].vpc_id != subnet.vpc_id:
            raise ApiError("InvalidNetworkSettings", f"The security group '{name}' does not exist in {subnet.vpc_id}")
        groups.append(known[name])
    if not any(_lets_lustre_in(one) for one in groups):
        raise ApiError("InvalidNetworkSettings",
                       "The file system cannot be created because the default security group in the subnet provided or "
                       "the provided security groups do not permit Lustre LNET network traffic on port 988")
    return subnet, groups


def _lets_lustre_in(group: Any) -> bool:
    return any(rule.ip_protocol == "-1" or int(rule.from_port or 0) <= LNET_PORT <= int(rule.to_port or 0)
               for rule in group.ingress_rules)


def _file_system(account: AwsAccount, region: str, name: str) -> Resource:
    found = {one.name: one for one in file_systems(account, region)}.get(name)
    if found is None:
        raise ApiError("FileSystemNotFound", f"File system '{name}' does not exist.")
    return found


def _available(account: AwsAccount, region: str, name: str) -> Resource:
    found = _file_system(account, region, name)
    state = _described(account, found)["Lifecycle"]
    if state != "AVAILABLE":
        raise ApiError("BadRequest", f"The file system {name} is in the state {state}; it must be AVAILABLE.")
    return found


def _links(account: AwsAccount, file_system: str) -> list[Resource]:
    _forget_deleted(account)
    return [one for one in account.resources.of_kind(LINK) if one.attributes["file_system"] == file_system]


def _add_task(account: AwsAccount, region: str, file_system: str, paths: list[str], takes_s: float) -> Resource:
    name = f"task-0{uuid4().hex[:16]}"
    body = {"TaskId": name, "Type": "IMPORT_METADATA_FROM_REPOSITORY", "FileSystemId": file_system, "Paths": paths}
    return account.resources.add(TASK, name, location=region, takes_s=takes_s, file_system=file_system, is_done=False,
                                 body=body)


def _settle(account: AwsAccount, task: Resource) -> None:
    """Turn the objects below a task's paths into files; a path that no link covers fails the task."""
    if task.attributes["is_done"]:
        return
    task.attributes |= {"is_done": True, "failure": ""}
    links = [one.attributes["body"] for one in _links(account, task.attributes["file_system"])]
    for path in task.attributes["body"]["Paths"] or [one["DataRepositoryPath"] for one in links]:
        covering = [one for one in links
                    if f"{path.rstrip('/')}/".startswith(f"{one['DataRepositoryPath'].rstrip('/')}/")]
        if not covering:
            task.attributes["failure"] = f"The path {path} is not in a data repository of the file system."
            return
        _import(account, task.attributes["file_system"], covering[0], path)


def _import(account: AwsAccount, file_system: str, link: JsonDict, path: str) -> None:
    bucket, _, prefix = path.removeprefix("s3://").rstrip("/").partition("/")
    root = link["DataRepositoryPath"].removeprefix("s3://").rstrip("/").partition("/")[2]
    folder = account.folder / "fsx" / file_system / link["FileSystemPath"].strip("/")
    folder.mkdir(parents=True, exist_ok=True)
    client = account.client("s3", "us-east-1")
    found = account.backends("s3")["aws"].buckets.get(bucket)
    for key in list(found.keys) if found else []:
        if key.startswith(f"{prefix}/") and not key.endswith("/"):
            target = folder / key.removeprefix(root).lstrip("/")
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(client.get_object(Bucket=bucket, Key=key)["Body"].read())


def _described(account: AwsAccount, resource: Resource) -> JsonDict:
    body = dict(resource.attributes["body"])
    body["Lifecycle"] = "AVAILABLE" if account.resources.is_ready(resource) else "CREATING"
    if resource.kind == TASK:
        body["Lifecycle"] = "EXECUTING"
        if account.resources.is_ready(resource):
            _settle(account, resource)
            failure = resource.attributes["failure"]
            body["Lifecycle"] = "FAILED" if failure else "SUCCEEDED"
            body |= {"FailureDetails": {"Message": failure}} if failure else {}
    elif resource.attributes["deleted_at"] is not None:
        body["Lifecycle"] = "DELETING"
    return body


def _forget_deleted(account: AwsAccount) -> None:
    for kind in (FILE_SYSTEM, LINK):
        for one in account.resources.of_kind(kind):
            if (at := one.attributes["deleted_at"]) is not None and account.clock.now >= at:
                account.resources.remove(kind, one.name)
    known = {one.name for one in account.resources.of_kind(FILE_SYSTEM)}
    for one in account.resources.of_kind(LINK):
        if one.attributes["file_system"] not in known:
            account.resources.remove(LINK, one.name)
