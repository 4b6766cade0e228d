"""`az ml` and `az monitor autoscale`: workspaces, and online endpoints with their deployments."""

from fnmatch import fnmatchcase
from typing import Any

import yaml

from cloudsim.azure.arm import Subscription, identifier, names_of
from cloudsim.azure.cluster_cloud import ACCOUNT_VARIABLE, blob_error
from cloudsim.azure.facts import FACTS
from cloudsim.azure.storage import HOST, pull_error
from cloudsim.grammar import ParsedCommand
from cloudsim.state import Refusal, Resource, schema_error
from embark.rehearse.running_servers import Deployments
from embark.render.targets.endpoints import ARTIFACT
from embark.values import JsonDict

WORKSPACE = "Microsoft.MachineLearningServices/workspaces"
ENDPOINT = f"{WORKSPACE}/onlineEndpoints"
DEPLOYMENT = f"{ENDPOINT}/deployments"
SCALING = "Microsoft.Insights/autoscaleSettings"


def create_workspace(azure: Subscription, command: ParsedCommand) -> Any:
    group, name = names_of(command)
    return azure.view(azure.find(WORKSPACE, group, name) or azure.create(
        command, WORKSPACE, group, name, location=azure.location(command, group), takes_s=90.0))


def _read(command: ParsedCommand) -> JsonDict:
    document: JsonDict = yaml.safe_load(command.call.read(command.text("--file")))
    if why := schema_error("azure/azureml.json", document):
        raise Refusal(f"Error: Validation for the YAML file {command.text('--file')} failed: {why}")
    return document


def endpoint_of(azure: Subscription, command: ParsedCommand, name: str) -> Resource:
    return azure.need(ENDPOINT, command.text("--resource-group"), command.text("--workspace-name"), name)


def create_endpoint(azure: Subscription, command: ParsedCommand) -> Any:
    document = _read(command)
    workspace = azure.need(WORKSPACE, command.text("--resource-group"), command.text("--workspace-name"))
    made = azure.create(
        command, ENDPOINT, *workspace.name.split("/"), document["name"], location=workspace.location, takes_s=60.0,
        scoring_uri=f"https://{document['name']}.{workspace.location}.inference.ml.azure.com/score",
        identity={"type": "system_assigned", "principal_id": identifier("endpoint", document["name"])})
    made.attributes["deployed"] = Deployments()
    return azure.view(made)


def create_deployment(azure: Subscription, command: ParsedCommand) -> Any:
    """Create a deployment, or update it: machines of one that exists are replaced."""
    given = _read(command)
    endpoint = endpoint_of(azure, command, given["endpoint_name"])
    kind = azure.machine_type(given["instance_type"], endpoint.location)
    if not any(fnmatchcase(kind.name, one) for one in FACTS["azureml"]["sizes"]):
        raise Refusal(f"(BadArgument) The instance type {kind.name} is not supported by managed online endpoints.")
    deployed = endpoint.attributes["deployed"]
    # A fifth more machines are kept for upgrades.
    count = 0 if given["name"] in deployed.servers else -(-6 * given["instance_count"] // 5)
    if why := azure.quota_error(kind, endpoint.location, count, is_spot=False):
        raise Refusal(f"(OutOfQuota) Not enough quota available for {kind.name}: {why}")
    image, env = given["environment"]["image"], given["environment_variables"]
    principal = endpoint.attributes["body"]["identity"]["principal_id"]
    why = pull_error(azure, image, principal) if HOST in image else f"{image} is in no registry of Azure"
    if why:
        raise Refusal(f"(BadArgument) The image cannot be pulled with the endpoint's identity: {why}")
    container = env.get(ARTIFACT, "").removeprefix("az://").partition("/")[0]
    routes = given["environment"]["inference_config"]
    server = azure.account.make_server(given["name"])
    why = blob_error(azure, env.get(ACCOUNT_VARIABLE, ""), container, principal, write=False)
    for route in ("readiness_route", "liveness_route") if not why else ():
        why = why or server.start(env, port=str(routes[route]["port"]), probe=routes[route]["path"])
    if why:
        raise Refusal(f"(ResourceNotReady) User container has crashed or terminated: {why}")
    deployed.add(given["name"], server, routes["scoring_route"]["path"])
    if command["--all-traffic"]:
        endpoint.attributes["body"]["traffic"] = deployed.traffic = {given["name"]: 100}
    return azure.view(azure.create(
        command, DEPLOYMENT, *endpoint.name.split("/"), given["name"], location=endpoint.location, takes_s=480.0,
        is_paid=True, instance_type=kind.name, instance_count=given["instance_count"]))


def list_deployments(azure: Subscription, command: ParsedCommand) -> Any:
    return [azure.view(one) for one in azure.below(endpoint_of(azure, command, command.text("--endpoint-name")))]


def delete_deployment(azure: Subscription, command: ParsedCommand) -> Any:
    endpoint, name = endpoint_of(azure, command, command.text("--endpoint-name")), command.text("--name")
    if why := endpoint.attributes["deployed"].remove(name):
        raise Refusal(f"(BadRequest) {why}")
    azure.delete(command, azure.need(DEPLOYMENT, *endpoint.name.split("/"), name))


def delete_endpoint(azure: Subscription, command: ParsedCommand) -> Any:
    endpoint = endpoint_of(azure, command, command.text("--name"))
    endpoint.attributes["deployed"].close()
    azure.delete(command, endpoint)


def update_endpoint(azure: Subscription, command: ParsedCommand) -> Any:
    endpoint = endpoint_of(azure, command, command.text("--name"))
    deployed = endpoint.attributes["deployed"]
    traffic = {name: int(share) for name, _, share in (
        one.partition("=") for one in command.text("--traffic").split())}
    if why := deployed.split_error(traffic):
        raise Refusal(f"(BadArgument) {why}")
    endpoint.attributes["body"]["traffic"] = deployed.traffic = traffic
    return azure.view(endpoint)


def invoke(azure: Subscription, command: ParsedCommand) -> Any:
    deployed = endpoint_of(azure, command, command.text("--name")).attributes["deployed"]
    status, text = deployed.ask(command.call.read(command.text("--request-file")))
    if status != 200:
        raise Refusal(f"(HTTP status {status}) Content: {text}")
    return text


def create_scaling(azure: Subscription, command: ParsedCommand) -> Any:
    group, name = names_of(command)
    least, count, most = (int(command.text(flag, command.text("--count"))) for flag in (
        "--min-count", "--count", "--max-count"))
    if azure.by_id(command.text("--resource")) is None:
        raise Refusal(f"(ResourceNotFound) The resource {command.text('--resource')!r} to scale does not exist.", 3)
    if not least <= count <= most:
        raise Refusal(f"(InvalidAutoscaleSetting) {least} <= {count} <= {most} does not hold for the instances.")
    return azure.view(azure.create(command, SCALING, group, name, location=azure.group(group).location))


def create_rule(azure: Subscription, command: ParsedCommand) -> Any:
    azure.need(SCALING, command.text("--resource-group"), command.text("--autoscale-name"))


def delete_scaling(azure: Subscription, command: ParsedCommand) -> Any:
    found = azure.find(SCALING, *names_of(command))
    if found is not None:
        azure.delete(command, found)
