"""Cloud Run services and Vertex AI endpoints."""

import json
from collections.abc import Mapping
from typing import Any

import yaml

from cloudsim.gcp.compute import check_quota
from cloudsim.gcp.jobs import service_agent
from cloudsim.gcp.machines import bucket_trouble
from cloudsim.gcp.project import Invocation, Project, facts
from cloudsim.gcp.registry import ArtifactRegistry
from cloudsim.state import Resource, schema_error
from embark.catalog import load_catalog
from embark.rehearse.running_servers import Deployments, EndpointServer
from embark.render.targets.endpoints import ARTIFACT

SERVICE, ENDPOINT, MODEL = "Cloud Run service", "Vertex AI endpoint", "Vertex AI model"
INGRESS = "run.googleapis.com/ingress"


def _start(project: Project, command: Invocation, name: str, image: str, account: str, env: Mapping[str, str],
           **server: Any) -> EndpointServer | str:
    """Start the server of a deployment, or return why it does not start."""
    if not image.partition("/")[0].endswith(("gcr.io", "docker.pkg.dev")):
        command.fail(f"INVALID_ARGUMENT: Expected an image path like [host/]repo-path[:tag and/or @digest], where host "
                     f"is one of [region.]gcr.io or [region-]docker.pkg.dev but obtained {image}")
    if ArtifactRegistry(project).repository_error(image) or not project.account.images.is_pushed(image):
        command.fail(f"NOT_FOUND: Image '{image}' not found.")
    account = account or project.compute_account
    known = (project.compute_account, service_agent(project))
    if account not in known and project.resources.find("service account", account) is None:
        command.fail(f"PERMISSION_DENIED: Permission 'iam.serviceaccounts.actAs' denied on service account {account} "
                     "(or it may not exist).")
    made = project.account.make_server(name)
    return bucket_trouble(project, env.get(ARTIFACT, ""), "read", account) or made.start(env, **server) or made


def _split(command: Invocation, flag: str, deployed: Deployments, new: str = "") -> dict[str, int]:
    """Return how a flag divides the traffic."""
    given = {key: int(value) for pair in command.pairs(flag) for key, value in pair.items()}
    if why := deployed.split_error(given, new):
        command.fail(f"INVALID_ARGUMENT: {flag}: {why}")
    return given


# Cloud Run


def _replace(project: Project, command: Invocation) -> str:
    region = command.location("--region")
    document = yaml.safe_load(command.call.read(command.name("FILE")))
    if why := schema_error("gcp/cloud_run.json", document):
        command.fail(f"INVALID_ARGUMENT: {why}")
    name, template = document["metadata"]["name"], document["spec"]["template"]["spec"]
    container = template["containers"][0]
    limits, probe, rules = container["resources"]["limits"], container["startupProbe"], facts()["cloud_run"]
    gib, port = float(limits["memory"].removesuffix("Gi")), str(container["ports"][0]["containerPort"])
    least = next(cpus for most, cpus in rules["cpus"] if gib <= most)
    if int(limits["cpu"].removesuffix("000m")) < least:
        command.fail(f"INVALID_ARGUMENT: spec.template.spec.containers.resources.limits.cpu: Invalid value specified "
                     f"for cpu. For {limits['memory']} of memory, cpu must be at least {least}.")
    if probe["periodSeconds"] * probe["failureThreshold"] > rules["start_s"]:
        command.fail("INVALID_ARGUMENT: startup_probe: failure_threshold * period_seconds must not exceed "
                     f"{rules['start_s']} seconds.")
    found = project.resources.find(SERVICE, f"{region}/{name}")
    deployed = found.attributes["deployed"] if found else Deployments()
    revision = f"{name}-{len(deployed.servers) + 1:05}-abc"
    server = _start(project, command, revision, container["image"], template.get("serviceAccountName", ""),
                    {row["name"]: row["value"] for row in container["env"]}, port=port,
                    probe=probe["httpGet"]["path"], disk_gib=gib)
    if isinstance(server, str):
        command.fail(f"Revision '{revision}' is not ready and cannot serve traffic. The user-provided container "
                     f"failed the configured startup probe checks. {server}")
    deployed.add(revision, server)
    deployed.traffic = {revision: 100}
    project.resources.add(SERVICE, f"{region}/{name}", location=region, is_paid=True, document=document,
                          deployed=deployed)
    return f"Service [{name}] has been deployed and is serving 100 percent of traffic.\n"


def _service(project: Project, command: Invocation) -> Resource:
    found = project.resources.find(SERVICE, f"{command.location('--region')}/{command.name('SERVICE')}")
    if found is None:
        command.fail(f"Cannot find service [{command.name('SERVICE')}]")
    return found


def _update_service(project: Project, command: Invocation) -> None:
    _service(project, command).attributes["document"]["metadata"]["annotations"][INGRESS] = command.text("--ingress")


def _update_traffic(project: Project, command: Invocation) -> None:
    deployed = _service(project, command).attributes["deployed"]
    deployed.traffic = _split(command, "--to-revisions", deployed)


def _proxy(project: Project, command: Invocation) -> str:
    """Return the arguments of the program that passes connections on."""
    found, port = _service(project, command).attributes, command.text("--port", "8080")
    if "cloud-run-proxy" not in project.components:
        command.fail("This command requires the `cloud-run-proxy` component to be installed.")
    if found["document"]["metadata"]["annotations"].get(INGRESS, "all") != "all":
        command.fail(f"the service is not reachable from here: {INGRESS} lets in its VPC network alone (404)")
    return f"{port} {port} {found['deployed'].servers[found['deployed'].active].port}"


def _delete_service(project: Project, command: Invocation) -> None:
    found = _service(project, command)
    found.attributes["deployed"].close()
    project.resources.remove(*found.key)


# Vertex AI


def _create_endpoint(project: Project, command: Invocation) -> str:
    name = str(1000 + len(project.resources.of_kind(ENDPOINT)))
    project.resources.add(ENDPOINT, name, location=command.location("--region"), deployed=Deployments(), titles={},
                          display_name=command.text("--display-name"))
    return f"Created Vertex AI endpoint: {project.path}/locations/{command.text('--region')}/endpoints/{name}.\n"


def _find(project: Project, command: Invocation, kind: str, name: str) -> Resource:
    found = project.resources.find(kind, name)
    if found is None or found.location != command.location("--region"):
        command.fail(f"NOT_FOUND: The {kind} {name!r} does not exist in {command.text('--region')}.")
    return found


def _endpoint(project: Project, command: Invocation) -> Resource:
    return _find(project, command, ENDPOINT, command.name("ENDPOINT"))


def _model(project: Project, command: Invocation) -> Resource:
    return _find(project, command, MODEL, command.name("MODEL"))


def _show_endpoint(project: Project, one: Resource) -> dict[str, Any]:
    deployed = one.attributes["deployed"]
    return {"name": f"{project.path}/locations/{one.location}/endpoints/{one.name}",
            "displayName": one.attributes["display_name"], "trafficSplit": deployed.traffic,
            "deployedModels": [{"id": name, "displayName": one.attributes["titles"][name]}
                               for name in deployed.servers]}


def _upload(project: Project, command: Invocation) -> None:
    if why := schema_error("gcp/vertex_model.json", command.parsed.flags):
        command.fail(f"INVALID_ARGUMENT: {why}")
    _, mark, text = command.text("--container-env-vars").split("^", 2)
    project.resources.add(MODEL, command.text("--model-id"), location=command.location("--region"),
                          env=dict(row.split("=", 1) for row in text.split(mark)), flags=command.parsed.flags)


def _deploy(project: Project, command: Invocation) -> str:
    endpoint, region = _endpoint(project, command), command.text("--region")
    model = _find(project, command, MODEL, command.text("--model"))
    kind, flags = command.text("--machine-type"), model.attributes["flags"]
    machine = load_catalog().cpu_machines.get(kind)
    if machine is None or machine.cloud != "gcp" or region not in facts()["zones"]:
        command.fail(f"INVALID_ARGUMENT: Machine type \"{kind}\" is not supported in {region}.")
    least, most = (int(command.text(f"--{one}-replica-count", "1")) for one in ("min", "max"))
    if least > most:
        command.fail("INVALID_ARGUMENT: max_replica_count must not be less than min_replica_count.")
    deployed, quota = endpoint.attributes["deployed"], facts()["vertex"]["quota"]
    traffic = _split(command, "--traffic-split", deployed, "0")  # 0 is the deployment that the command makes.
    if check_quota(project, {quota: float(machine.vcpus * least)}, region, 1):
        command.fail(f"RESOURCE_EXHAUSTED: The following quota metrics exceed quota limits: {quota}")
    name, port = str(5000 + len(endpoint.attributes["titles"])), str(flags["--container-ports"])
    routes = {"AIP_HTTP_PORT": port, "AIP_HEALTH_ROUTE": flags["--container-health-route"],
              "AIP_PREDICT_ROUTE": flags["--container-predict-route"]}
    agent = service_agent(project)
    project.policies.setdefault(project.path, set()).add(("roles/editor", f"serviceAccount:{agent}"))
    server = _start(project, command, name, str(flags["--container-image-uri"]), command.text("--service-account") or
                    agent, {**routes, **model.attributes["env"]}, port=port, probe=routes["AIP_HEALTH_ROUTE"])
    if isinstance(server, str):
        command.fail(f"FAILED_PRECONDITION: Model server never became ready. Please validate that your model file or "
                     f"container configuration are valid. {server}")
    deployed.add(name, server, routes["AIP_PREDICT_ROUTE"])
    deployed.traffic = {name if id == "0" else id: share for id, share in traffic.items()}
    endpoint.attributes["titles"][name] = command.text("--display-name")
    endpoint.uses.add(model.key)
    endpoint.is_paid = True
    return f"Deployed a model to the endpoint {endpoint.name}. Id of the deployed model: {name}.\n"


def _update_endpoint(project: Project, command: Invocation) -> None:
    deployed = _endpoint(project, command).attributes["deployed"]
    deployed.traffic = {} if command.has("--clear-traffic-split") else _split(command, "--traffic-split", deployed)


def _undeploy(project: Project, command: Invocation) -> None:
    found = _endpoint(project, command)
    if why := found.attributes["deployed"].remove(command.text("--deployed-model-id")):
        command.fail(f"INVALID_ARGUMENT: {why}")
    found.is_paid = bool(found.attributes["deployed"].servers)


def _predict(project: Project, command: Invocation) -> str:
    deployed = _endpoint(project, command).attributes["deployed"]
    status, text = deployed.ask(command.call.read(command.text("--json-request")))
    if status != 200 or "predictions" not in json.loads(text):
        command.fail(f"FAILED_PRECONDITION: status {status}, and no predictions: {text}")
    return f"{text}\n"


def _delete_endpoint(project: Project, command: Invocation) -> None:
    found = _endpoint(project, command)
    if found.is_paid:
        command.fail(f"FAILED_PRECONDITION: Endpoint {found.name} has deployed models: undeploy them first.")
    project.resources.remove(*found.key)


def _delete_model(project: Project, command: Invocation) -> None:
    found = _model(project, command)
    if project.resources.users_of(found.key):
        command.fail(f"FAILED_PRECONDITION: Model {found.name} is deployed.")
    project.resources.remove(*found.key)
