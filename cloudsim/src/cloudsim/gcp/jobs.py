"""Vertex AI custom jobs, and slices of TPUs as queued resources."""

import base64
import re

import yaml

from cloudsim.gcp import machines, training
from cloudsim.gcp.compute import check_quota
from cloudsim.gcp.project import Invocation, Project, facts
from cloudsim.gcp.registry import pull_error
from cloudsim.state import Resource, schema_error
from embark.catalog import load_catalog
from embark.render.command import SPEC_PATH, SPEC_VARIABLE, WRITE_SPEC, WRITTEN_SPEC_PATH
from embark.render.targets.vertex import ACCELERATORS
from embark.spec.load import parse_spec
from embark.values import JsonDict, JsonMap

# Vertex AI


def service_agent(project: Project) -> str:
    """Return the account of jobs that name none: it may read and write the project's buckets and images."""
    return f"service-{project.number}@gcp-sa-aiplatform-cc.iam.gserviceaccount.com"


def _create_job(project: Project, command: Invocation) -> str:
    region = command.location("--region")
    if region not in facts()["zones"]:
        command.fail(f"INVALID_ARGUMENT: Unsupported region: {region}")
    spec = yaml.safe_load(command.call.read(command.text("--config"))) if command.text("--config") else {}
    account = command.text("--service-account") or str((spec or {}).get("serviceAccount") or "")
    name = submit(project, region, command.text("--display-name"), spec or {}, account, command)
    return f"CustomJob [{name}] is submitted successfully.\n\nYour job is still active. You may view the status of " \
           f"your job with the command\n\n  $ gcloud ai custom-jobs describe {name}\n"


def submit(project: Project, region: str, title: str, spec: JsonMap, account: str,
           command: Invocation) -> str:
    if why := schema_error("gcp/vertex_job.json", spec):
        command.fail(f"INVALID_ARGUMENT: Invalid value at 'custom_job.job_spec': {why}")
    metrics: dict[str, float] = {}
    for number, pool in enumerate(spec["workerPoolSpecs"]):
        for key, count in _check_pool(project, command, region, number, pool).items():
            metrics[key] = metrics.get(key, 0.0) + count
    short = check_quota(project, metrics, region, 1)
    if short:
        command.fail(f"RESOURCE_EXHAUSTED: The following quota metrics exceed quota limits: {', '.join(metrics)}")
    if account and project.resources.find("service account", account) is None:
        command.fail(f"PERMISSION_DENIED: You do not have permission to act as service_account: {account}. (or the "
                     "resource may not exist).")
    id_ = 5000 + len(project.resources.of_kind("custom job"))
    name = f"projects/{project.number}/locations/{region}/customJobs/{id_}"
    project.resources.add("custom job", name, location=region, is_paid=True, quota=metrics, title=title,
                                  spec=spec, state="JOB_STATE_PENDING", account=account or service_agent(project),
                                  takes_s=facts()["takes_s"]["custom_job"], logs="")
    return name


def _check_pool(project: Project, command: Invocation, region: str, number: int, pool: JsonMap
                ) -> dict[str, float]:
    where = f"job_spec.worker_pool_specs[{number}]"
    machine = pool.get("machineSpec") or {}
    machine_type, kind = str(machine.get("machineType")), str(machine.get("acceleratorType") or "")
    known = project.machines(machine_type)
    fits = [one for one in known if not kind or (kind in (ACCELERATORS.get(one.gpu.name), "NVIDIA_H100_MEGA_80GB") and
                                                 int(machine.get("acceleratorCount", 0)) == one.gpus_per_host)]
    if not fits:
        command.fail(f"INVALID_ARGUMENT: List of found errors: 1.Field: {where}.machine_spec; Message: Machine type "
                     f"\"{machine_type}\" with {machine.get('acceleratorCount', 0)} x {kind or 'no accelerator'} is "
                     "not supported.")
    zones = [f"{region}-{letter}" for letter in facts()["zones"][region]]
    if not any(project.is_sold(machine_type, zone) for zone in zones):
        command.fail(f"INVALID_ARGUMENT: Machine type \"{machine_type}\" is not available in region {region}.")
    quota = fits[0].quota
    count = float(fits[0].gpus_per_host) * int(pool.get("replicaCount", 1))
    return {f"vertex {quota.on_demand}": count} if quota else {}


def _job(project: Project, command: Invocation) -> Resource:
    given, region = command.name("CUSTOM_JOB"), command.text("--region")
    found = next((one for one in project.resources.of_kind("custom job")
                  if given in (one.name, one.name.rpartition("/")[2])
                  and (one.location == region or given.startswith("projects/"))), None)
    if found is None:
        command.fail(f"NOT_FOUND: The CustomJob does not exist. ({given} in {region or 'no region'})")
    return found


def _advance(project: Project, found: Resource) -> None:
    """Run a pending job to its end once its machines have started."""
    if found.attributes["state"] != "JOB_STATE_PENDING" or not project.resources.is_ready(found):
        return
    state, logs = _run(project, found)
    found.attributes.update(state=state, logs=logs)
    found.is_paid, found.attributes["quota"] = False, {}


def _run(project: Project, found: Resource) -> tuple[str, str]:
    pools = found.attributes["spec"]["workerPoolSpecs"]
    container = pools[0]["containerSpec"]
    env = {str(row["name"]): str(row.get("value", "")) for row in container.get("env", ())}
    account = found.attributes["account"]
    if account == service_agent(project):  # The role of the service agent allows both within the project.
        project.policies.setdefault(project.path, set()).add(("roles/editor", f"serviceAccount:{account}"))
    for pool in pools:
        trouble = pull_error(project, str(pool["containerSpec"]["imageUri"]), account)
        if trouble:
            return "JOB_STATE_FAILED", f"Failed to pull image: {trouble}\n"
    try:
        spec = base64.b64decode(env.pop(SPEC_VARIABLE, ""), validate=True).decode()
    except ValueError:
        return "JOB_STATE_FAILED", f"{SPEC_VARIABLE} is not base64\n"
    trouble = machines.access_trouble(project, spec, account, ("cloud-platform",))
    if trouble:
        return "JOB_STATE_FAILED", f"{trouble}\n"
    count = sum(int(pool.get("replicaCount", 1)) for pool in pools)
    name = found.attributes["title"] or "job"
    words = [str(word).replace(WRITE_SPEC, f"cp {SPEC_PATH} {WRITTEN_SPEC_PATH}") for word in (
        *container.get("command", ()), *container.get("args", ()))]
    commands = [["env", f"RANK={rank}", f"WORLD_SIZE={count}", f"MASTER_ADDR={name}-0.{name}", "MASTER_PORT=29500",
                 *words] for rank in range(count)]
    done = training.train(name, commands, env, spec)
    logs = "".join(done.logs.values())
    return ("JOB_STATE_SUCCEEDED", logs) if done.is_ok else ("JOB_STATE_FAILED", f"{logs}{done.sentence}\n")


def _show_job(project: Project, one: Resource) -> JsonDict:
    _advance(project, one)
    return {"name": one.name, "displayName": one.attributes["title"], "state": one.attributes["state"],
            "jobSpec": one.attributes["spec"]}


def _stream(project: Project, command: Invocation) -> str:
    found = _job(project, command)
    project.account.clock.advance(found.ready_at - project.account.clock.now)
    _advance(project, found)
    if found.attributes["state"] != "JOB_STATE_SUCCEEDED":
        command.fail(f"{found.attributes['state']}: {found.attributes['logs'].strip()[-1500:]}")
    return str(found.attributes["logs"])


def _cancel(project: Project, command: Invocation) -> None:
    found = _job(project, command)
    if found.attributes["state"] == "JOB_STATE_PENDING":
        found.attributes["state"] = "JOB_STATE_CANCELLED"
        found.is_paid, found.attributes["quota"] = False, {}


# TPUs


def _create_request(project: Project, command: Invocation) -> None:
    name, zone = command.name("QUEUED_RESOURCE"), command.location("--zone")
    kind, runtime = command.text("--accelerator-type"), command.text("--runtime-version")
    machine = load_catalog().machines.get(kind)
    sold = load_catalog().zones_of(machine) if machine else None
    if machine is None or not machine.gpu.name.startswith("TPU"):
        command.fail(f"INVALID_ARGUMENT: Invalid accelerator type: {kind}")
    if not project.is_zone(zone) or (sold is not None and zone not in (*sold.zones, *sold.others)):
        command.fail(f"PERMISSION_DENIED: User does not have permission to submit requests for accelerator type "
                     f"{kind} in location {zone} (or the location does not have it).")
    runtimes = facts()["tpu_runtimes"].get(kind.rpartition("-")[0], ())
    if runtime not in runtimes:
        command.fail(f"INVALID_ARGUMENT: Runtime version {runtime} is not valid for accelerator type {kind}: "
                     f"{', '.join(runtimes)}")
    count = int(command.text("--node-count", "1"))
    if not command.text("--node-id") and not command.text("--node-prefix"):
        command.fail("argument (--node-id | --node-count --node-prefix): Must be specified.", 2)
    if project.resources.find("queued resource", f"{zone}/{name}"):
        command.fail(f"ALREADY_EXISTS: Resource '{project.path}/locations/{zone}/queuedResources/{name}' already "
                     "exists")
    metrics = {metric: float(machine.num_gpus * count) for metric in (
        [machine.quota.spot if command.has("--spot") else machine.quota.on_demand] if machine.quota else [])}
    short = check_quota(project, metrics, zone.rpartition("-")[0], 1)
    if short:
        command.fail(f"RESOURCE_EXHAUSTED: Quota limit '{next(iter(metrics))}' has been exceeded.")
    nodes = [command.text("--node-id")] if command.text("--node-id") else [
        f"{command.text('--node-prefix')}-{index}" for index in range(count)]
    metadata = {key: command.call.read(path) for pair in command.pairs("--metadata-from-file")
                for key, path in pair.items()}
    project.resources.add(
        "queued resource", f"{zone}/{name}", location=zone, is_paid=True, quota=metrics, nodes=nodes, metadata=metadata,
        num_hosts=machine.num_hosts, scopes=command.words("--scopes"), accelerator=kind,
        account=command.text("--service-account") or project.compute_account,
        takes_s=facts()["takes_s"]["queued_resource"])


def _request(project: Project, command: Invocation) -> Resource:
    name, zone = command.name("QUEUED_RESOURCE"), command.location("--zone")
    found = project.resources.find("queued resource", f"{zone}/{name}")
    if found is None:
        command.fail(f"NOT_FOUND: Resource '{project.path}/locations/{zone}/queuedResources/{name}' was not found")
    return found


def _show_request(project: Project, one: Resource) -> JsonDict:
    state = "ACTIVE" if project.resources.is_ready(one) else "WAITING_FOR_RESOURCES"
    return {"name": f"{project.path}/locations/{one.location}/queuedResources/{one.name.partition('/')[2]}",
            "state": {"state": state}, "tpu": {"nodeSpec": [{"nodeId": node} for node in one.attributes["nodes"]]}}


def _delete_request(project: Project, command: Invocation) -> None:
    found = _request(project, command)
    if project.resources.is_ready(found) and not command.has("--force"):
        command.fail("FAILED_PRECONDITION: The queued resource is ACTIVE: delete its nodes first, or use --force.")
    project.resources.remove(*found.key)


def _tpu_ssh(project: Project, command: Invocation) -> str:
    """Return the log of one host. The slice trains as one process on this machine's CPU."""
    node, zone = command.name("USER@TPU").rpartition("@")[2], command.location("--zone")
    found = next((one for one in project.resources.of_kind("queued resource")
                  if one.location == zone and node in one.attributes["nodes"]), None)
    if found is None or not project.resources.is_ready(found):
        command.fail(f"NOT_FOUND: Resource '{project.path}/locations/{zone}/nodes/{node}' was not found")
    worker = command.text("--worker", "0")
    if worker != "all" and int(worker) >= found.attributes["num_hosts"]:
        command.fail(f"Worker index {worker} is not within range of this TPU: it has {found.attributes['num_hosts']}.")
    if "tail" not in command.text("--command"):
        return ""
    if "logs" not in found.attributes:
        found.attributes["logs"] = _train_slice(project, command, found, node)
    return str(found.attributes["logs"])


def _train_slice(project: Project, command: Invocation, found: Resource, node: str) -> str:
    account, scopes = found.attributes["account"], found.attributes["scopes"]
    service = machines.boot(project, node, found.attributes["metadata"], account, scopes)
    trouble = service.trouble or machines.access_trouble(project, service.spec, account, scopes)
    if trouble:
        command.fail(f"[/usr/bin/ssh] the log of {node} ends with: {trouble}")
    spec = parse_spec(service.spec)
    assert spec is not None
    words = [re.sub(r"^place\.device=tpu$", "place.device=jax", word) for word in service.words]
    done = training.train(node, [words], {"JAX_PLATFORMS": "cpu"}, service.spec)
    if not done.is_ok:
        command.fail(f"[/usr/bin/ssh] exited with return code [1]. {done.sentence}")
    return "".join(done.logs.values())


def _accelerator_types(project: Project, command: Invocation) -> list[JsonDict]:
    zone = command.location("--zone")
    return [{"name": f"projects/{project.id}/locations/{zone}/acceleratorTypes/{one.name}", "type": one.name}
            for one in load_catalog().machines.values()
            if one.gpu.kind == "tpu" and project.is_sold(one.machine_type or one.name, zone)]


def _jobs(project: Project, command: Invocation) -> list[JsonDict]:
    return [_show_job(project, one) for one in project.resources.of_kind("custom job")
            if one.location == command.location("--region")]
