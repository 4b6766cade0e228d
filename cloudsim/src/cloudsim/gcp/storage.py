"""Buckets, Filestore and Managed Lustre."""

import re
import shutil
from pathlib import Path
from typing import Any

from cloudsim.gcp import compute, object_store
from cloudsim.gcp.project import Invocation, Project, facts
from cloudsim.state import Resource
from embark.values import JsonDict

BUCKET = re.compile(r"[a-z0-9]([a-z0-9._-]{1,61})[a-z0-9]")
PLACEHOLDERS = ("embark-example", "your-bucket", "example", "test", "data", "bucket")  # Names in use elsewhere.


def bucket_folder(project: Project, name: str) -> Path:
    """Return the folder of this machine that holds a bucket's objects."""
    return object_store.folder(project.account, name)


def bucket_of(project: Project, command: Invocation, url: str) -> Resource:
    name = url.removeprefix("gs://").partition("/")[0]
    found = project.resources.find("bucket", name)
    if found is None:
        command.fail(f"gs://{name} not found: 404." if command.parsed.name == "storage buckets describe" else
                     "HTTPError 404: The specified bucket does not exist.")
    return found


def _create(project: Project, command: Invocation) -> None:
    for url in command.names("URL"):
        name = url.removeprefix("gs://").rstrip("/")
        if not url.startswith("gs://") or not BUCKET.fullmatch(name):
            command.fail(f"HTTPError 400: Invalid bucket name: '{name}'")
        if name in PLACEHOLDERS:
            command.fail("HTTPError 409: The requested bucket name is not available. The bucket namespace is shared by "
                         "all users of the system. Please select a different name and try again.")
        if project.resources.find("bucket", name):
            command.fail("HTTPError 409: Your previous request to create the named bucket succeeded and you already "
                         "own it.")
        location = command.text("--location", "us").lower()
        if location not in facts()["zones"] and location not in ("us", "eu", "asia"):
            command.fail("HTTPError 400: The specified location constraint is not valid.")
        object_store.create(project.account, name)
        project.resources.add("bucket", name, location=location, is_paid=True)


def _bucket(project: Project, command: Invocation) -> Resource:
    return bucket_of(project, command, command.name("URL"))


def _show_bucket(project: Project, found: Resource) -> JsonDict:
    return {"name": found.name, "location": found.location.upper(), "storage_url": f"gs://{found.name}/",
            "uniform_bucket_level_access": True}


def _bind(project: Project, command: Invocation) -> None:
    found = _bucket(project, command)
    project.bind(command, f"buckets/{found.name}")


def _unbind(project: Project, command: Invocation) -> None:
    found = _bucket(project, command)
    held = project.policies.setdefault(f"buckets/{found.name}", set())
    row = (command.text("--role"), command.text("--member"))
    if row not in held:
        command.fail("Policy bindings with the specified principal, role, and condition not found!")
    held.discard(row)


def _policy(project: Project, command: Invocation) -> JsonDict:
    found = _bucket(project, command)
    held = sorted(project.policies.get(f"buckets/{found.name}", set()))
    return {"bindings": [{"role": role, "members": [member]} for role, member in held]}


def _delete_bucket(project: Project, command: Invocation) -> None:
    for url in command.names("URLS"):
        found = bucket_of(project, command, url)
        if any(bucket_folder(project, found.name).iterdir()):
            command.fail("HTTPError 409: The bucket you tried to delete is not empty.")
        _drop(project, found)


def _drop(project: Project, found: Resource) -> None:
    object_store.delete(project.account, found.name)
    shutil.rmtree(bucket_folder(project, found.name), ignore_errors=True)
    project.policies.pop(f"buckets/{found.name}", None)
    project.resources.remove(*found.key)


def _paths(project: Project, command: Invocation, url: str) -> list[Path]:
    """Return the objects that an address names; `*` and folders are allowed."""
    found = bucket_of(project, command, url)
    root = bucket_folder(project, found.name)
    below = url.removeprefix("gs://").partition("/")[2].rstrip("/")
    if not below:
        return [root]
    return sorted(root.glob(below.replace("**", "*")))


def _rm(project: Project, command: Invocation) -> None:
    for url in command.names("URLS"):
        found = bucket_of(project, command, url)
        paths = _paths(project, command, url)
        if not paths:
            command.fail("The following URLs matched no objects or files:\n-" + url)
        for path in paths:
            if path.is_dir() and not command.has("--recursive"):
                command.fail("The following URLs matched no objects or files:\n-" + url)
            if path == bucket_folder(project, found.name):
                _drop(project, found)
            elif path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()


def _cp(project: Project, command: Invocation) -> None:
    *sources, target = command.names("SOURCE") + ([command.name("DESTINATION")] if command.name("DESTINATION") else [])
    for source in sources:
        found = _paths(project, command, source) if source.startswith("gs://") else sorted(
            command.call.folder.glob(source)) if not source.startswith("/") else [Path(source)]
        found = [path for path in found if path.exists()]
        if not found:
            command.fail(f"The following URLs matched no objects or files:\n-{source}")
        for path in found:
            _copy(project, command, path, target, is_many=len(found) > 1 or len(sources) > 1)


def _copy(project: Project, command: Invocation, path: Path, target: str, *, is_many: bool) -> None:
    if target.startswith("gs://"):
        name = bucket_of(project, command, target).name
        below = target.removeprefix("gs://").partition("/")[2]
        to = bucket_folder(project, name) / below
    else:
        to = command.call.folder / target
    if target.endswith("/") or is_many or to.is_dir():
        to = to / path.name
    to.parent.mkdir(parents=True, exist_ok=True)
    if path.is_dir():
        if not (command.has("--recursive") or command.parsed.name == "storage rsync"):
            command.fail(f"The following URLs matched no objects or files:\n-{path.name}")
        shutil.copytree(path, to, dirs_exist_ok=True)
    else:
        shutil.copyfile(path, to)


def _ls(project: Project, command: Invocation) -> str:
    urls = command.names("PATH")
    if not urls:
        return "".join(f"gs://{one.name}/\n" for one in project.resources.of_kind("bucket"))
    lines = []
    for url in urls:
        paths = _paths(project, command, url)
        if not paths:
            command.fail("One or more URLs matched no objects.")
        root = bucket_folder(project, bucket_of(project, command, url).name).parent
        for path in paths:
            listed = path.rglob("*") if command.has("--recursive") else path.iterdir()
            inner = sorted(listed) if path.is_dir() else [path]
            lines += [f"gs://{one.relative_to(root)}{'/' if one.is_dir() else ''}\n" for one in inner]
    return "".join(lines)


# file systems


def _location(project: Project, command: Invocation, *, regional: bool, word: str) -> str:
    location = command.location("--location", "--zone", "--region")
    known = location in facts()["zones"] if regional else project.is_zone(location)
    if not known:
        command.fail(f"INVALID_ARGUMENT: Location {location} is not valid for {word}: it needs a "
                     f"{'region' if regional else 'zone'}.")
    return location


def _create_filestore(project: Project, command: Invocation) -> str:
    tier = command.text("--tier", "basic-hdd").lower()
    if tier not in facts()["filestore"]["tiers"]:
        command.fail(f"INVALID_ARGUMENT: Tier {tier} is not supported.")
    is_regional = tier in facts()["filestore"]["regional"]
    location = _location(project, command, regional=is_regional, word=f"tier {tier.upper()}")
    share = (command.pairs("--file-share") or [{}])[0]
    capacity = re.fullmatch(r"(\d+)(GiB|GB|TiB|TB)?", share.get("capacity", ""))
    if capacity is None or not share.get("name"):
        command.fail("argument --file-share: name and capacity must be specified.", 2)
    gib = int(capacity[1]) * (1024 if (capacity[2] or "").startswith("T") else 1)
    least, most, step = facts()["filestore"]["tiers"][tier]
    if not least <= gib <= most or gib % step:
        command.fail(f"INVALID_ARGUMENT: capacity {gib} GiB is invalid for tier {tier.upper()}: it must be between "
                     f"{least} and {most} GiB, in steps of {step} GiB.")
    network = compute.network_of(project, command, (command.pairs("--network") or [{}])[0].get("name", ""))
    return _create_system(project, command, "filestore", location, network, gib=gib, share=share["name"],
                          subnet="10.91", tier=tier.upper())


def _find(project: Project, command: Invocation, kind: str) -> Resource:
    location, name = command.location("--location", "--zone", "--region"), command.name("INSTANCE")
    found = project.resources.find(kind, f"{location}/{name}")
    if found is None:
        command.fail(f"NOT_FOUND: Resource '{project.path}/locations/{location}/instances/{name}' was not found")
    return found


def _create_system(project: Project, command: Invocation, kind: str, location: str, network: Resource, *, gib: int,
                   share: str, subnet: str, **attributes: Any) -> str:
    name = f"{location}/{command.name('INSTANCE')}"
    if project.resources.find(kind, name):
        command.fail(f"ALREADY_EXISTS: Resource '{project.path}/locations/{name.replace('/', '/instances/')}' already "
                     "exists")
    made = project.resources.add(
        kind, name, location=location, uses={network.key}, is_paid=True, gib=gib, share=share, network=network.name,
        address=f"{subnet}.{len(project.resources.of_kind(kind)) + 2}.2", takes_s=facts()["takes_s"][kind],
        **attributes)
    if not command.has("--async"):
        project.account.clock.advance(made.ready_at - project.account.clock.now)
    return ""


def _show_filestore(project: Project, one: Resource) -> JsonDict:
    ready = project.resources.is_ready(one)
    return {"name": f"{project.path}/locations/{one.location}/instances/{one.name.partition('/')[2]}",
            "tier": one.attributes["tier"], "state": "READY" if ready else "CREATING",
            "fileShares": [{"name": one.attributes["share"], "capacityGb": str(one.attributes["gib"])}],
            "networks": [{"network": one.attributes["network"],
                          **({"ipAddresses": [one.attributes["address"]]} if ready else {})}]}


def _create_lustre(project: Project, command: Invocation) -> str:
    location = _location(project, command, regional=False, word="Managed Lustre")
    gib, rate = command.text("--capacity-gib"), command.text("--per-unit-storage-throughput")
    step = facts()["lustre"]["step_gib"]
    if not gib.isdigit() or int(gib) % step or int(gib) < step:
        command.fail(f"INVALID_ARGUMENT: capacity_gib {gib} is invalid: it must be a multiple of {step}.")
    if rate not in facts()["lustre"]["throughputs"]:
        command.fail(f"INVALID_ARGUMENT: per_unit_storage_throughput {rate or 'unset'} is invalid: one of "
                     f"{', '.join(facts()['lustre']['throughputs'])}.")
    path = command.text("--network")
    network = compute.network_of(project, command, path)
    if not path.startswith(f"projects/{project.id}/global/networks/"):
        command.fail(f"INVALID_ARGUMENT: network {path} must be projects/PROJECT/global/networks/NETWORK.")
    if not any(network.key in one.uses for one in project.resources.of_kind("vpc peering")):
        command.fail(f"FAILED_PRECONDITION: network {network.name} has no connection to servicenetworking.googleapis."
                     "com: run gcloud services vpc-peerings connect")
    return _create_system(project, command, "lustre", location, network, gib=int(gib),
                          share=command.text("--filesystem"), subnet="10.92")


def _show_lustre(project: Project, one: Resource) -> JsonDict:
    return {"name": f"{project.path}/locations/{one.location}/instances/{one.name.partition('/')[2]}",
            "state": "ACTIVE" if project.resources.is_ready(one) else "CREATING",
            "mountPoint": f"{one.attributes['address']}@tcp:/{one.attributes['share']}"}


def _connect_peering(project: Project, command: Invocation) -> None:
    network = compute.network_of(project, command, command.text("--network"))
    uses = {network.key, *(compute.need(project, command, "address", "addresses", name).key
                           for name in command.words("--ranges"))}
    project.resources.add("vpc peering", network.name, uses=uses)


def _described(kind: str, shown: Any) -> Any:
    return lambda project, command: shown(project, _find(project, command, kind))


def _remove(kind: str) -> Any:
    def delete(project: Project, command: Invocation) -> str:
        found = _find(project, command, kind)
        folder = volume_folder(project, found)
        if folder.exists():
            shutil.rmtree(folder)
        project.resources.remove(*found.key)
        return ""

    return delete


def volume_folder(project: Project, found: Resource) -> Path:
    return project.account.folder / "volumes" / found.kind / found.name.replace("/", "-")


def _show_peering(project: Project, one: Resource) -> JsonDict:
    return {"network": one.name}
