"""Login, configuration, services, IAM, billing, quotas and monitoring."""

import re
from typing import Any

import yaml

from cloudsim.gcp.project import Invocation, Project, facts, quota_key
from embark.catalog import load_catalog
from embark.values import JsonDict

TOKEN = "ya29.stand-in"
BILLING = "billingAccounts/000000-AAAAAA-BBBBBB"


def _quiet(_: Project, __: Invocation) -> str:
    return ""


def _token(_: Project, __: Invocation) -> str:
    return f"{TOKEN}\n"


def _install(project: Project, command: Invocation) -> None:
    known = {"alpha", "beta", "gke-gcloud-auth-plugin", "kubectl", "docker-credential-gcr", "cloud-run-proxy"}
    for name in command.names("COMPONENT-IDS"):
        if name not in known:
            command.fail(f"The following components are unknown [{name}].")
        project.components.add(name)


def _set(project: Project, command: Invocation) -> str:
    key, value = command.name("SECTION/PROPERTY"), command.name("VALUE")
    if key in ("project", "core/project") and value != project.id:
        return "WARNING: You do not appear to have access to project [" + value + "] or it does not exist.\n"
    project.config[key.removeprefix("core/")] = value
    return ""


def _get_value(project: Project, command: Invocation) -> str:
    return project.config.get(command.name("SECTION/PROPERTY").removeprefix("core/"), "(unset)") + "\n"


def _enable(project: Project, command: Invocation) -> None:
    known = facts()["services"]["known"]
    for service in command.names("SERVICE"):
        name = service.removesuffix(".googleapis.com")
        if name not in known or not service.endswith(".googleapis.com"):
            command.fail(f"PERMISSION_DENIED: Not found or permission denied for service(s): {service}.")
        project.enable(name)


def _services(project: Project, _: Invocation) -> list[JsonDict]:
    return [{"config": {"name": f"{name}.googleapis.com"}, "state": "ENABLED"} for name in sorted(project.services)]


def _project(project: Project, command: Invocation) -> JsonDict:
    if command.name("PROJECT_ID_OR_NUMBER") not in (project.id, project.number):
        command.fail("The caller does not have permission")
    return {"projectId": project.id, "projectNumber": project.number, "lifecycleState": "ACTIVE", "name": project.id}


def _bind_project(project: Project, command: Invocation) -> None:
    if command.name("PROJECT_ID") != project.id:
        command.fail(f"PERMISSION_DENIED: The caller does not have permission on {command.name('PROJECT_ID')}")
    project.bind(command, project.path)


# service accounts


def _create_account(project: Project, command: Invocation) -> None:
    email = f"{command.name()}@{project.id}.iam.gserviceaccount.com"
    if project.resources.find("service account", email):
        command.fail(f"Resource in projects [{project.id}] is the subject of a conflict: Service account "
                     f"{command.name()} already exists within project {project.path}.")
    project.resources.add("service account", email)


def _account(project: Project, command: Invocation) -> JsonDict:
    email = command.name("SERVICE_ACCOUNT")
    if project.resources.find("service account", email) is None and email != project.compute_account:
        command.fail(f"NOT_FOUND: Unknown service account: {email}")
    return {"email": email, "name": f"{project.path}/serviceAccounts/{email}", "projectId": project.id}


def _bind_account(project: Project, command: Invocation) -> None:
    email = str(_account(project, command)["email"])
    project.bind(command, f"serviceAccounts/{email}")


# billing


def _billing(project: Project, command: Invocation) -> JsonDict:
    if command.name("PROJECT_ID") != project.id:
        command.fail("PERMISSION_DENIED: The caller does not have permission")
    return {"billingAccountName": BILLING, "billingEnabled": True, "projectId": project.id}


def _check_billing(command: Invocation) -> None:
    if command.text("--billing-account").removeprefix("billingAccounts/") != BILLING.partition("/")[2]:
        command.fail("PERMISSION_DENIED: The caller does not have permission")


def _create_budget(project: Project, command: Invocation) -> None:
    _check_billing(command)
    amount = command.text("--budget-amount")
    if not re.fullmatch(r"\d+(\.\d+)?([A-Z]{3})?", amount):
        command.fail(f"argument --budget-amount: Bad value [{amount}]", 2)
    for rule in command.pairs("--threshold-rule"):
        if not 0 < float(rule.get("percent", "0")) <= 10:
            command.fail("INVALID_ARGUMENT: Request contains an invalid argument.")
    name = command.text("--display-name")
    number = len(project.resources.of_kind("budget"))
    project.resources.add("budget", f"{name}-{number}", display_name=name)


def _budgets(project: Project, command: Invocation) -> list[JsonDict]:
    _check_billing(command)
    return [{"name": f"{BILLING}/budgets/{one.name}", "displayName": one.attributes["display_name"]}
            for one in project.resources.of_kind("budget")]


def _delete_budget(project: Project, command: Invocation) -> None:
    name = command.name("BUDGET").rpartition("/")[2]
    if project.resources.find("budget", name) is None:
        command.fail("NOT_FOUND: Requested entity was not found.")
    project.resources.remove("budget", name)


# quotas


def _quota_infos(project: Project, command: Invocation) -> list[JsonDict]:
    service = command.text("--service")
    if service.removesuffix(".googleapis.com") not in facts()["services"]["known"]:
        command.fail(f"PERMISSION_DENIED: Not found or permission denied for service(s): {service}.")
    locations = [*facts()["zones"], *(f"{region}-{letter}" for region, letters in facts()["zones"].items()
                                   for letter in letters)]
    rows: dict[str, JsonDict] = {}
    for quota in load_catalog().quotas.values():
        for name, code in ((quota.on_demand, quota.on_demand_code), (quota.spot, quota.spot_code)):
            if quota.cloud != "gcp" or not name or (quota.service or name.partition("/")[0]) != service:
                continue
            dimension, _, value = quota.dimension.partition("=")
            info = {"applicableLocations": locations, "dimensions": {dimension: value} if dimension else {},
                    "details": {"value": str(int(project.quota(quota_key(quota, name))))}}
            for one in dict.fromkeys((code or name, code.replace("PerZone", "PerRegion") or name)):
                row = rows.setdefault(one, {"quotaId": one, "metric": name, "service": service, "dimensionsInfos": []})
                row["dimensionsInfos"].append(info)
    return list(rows.values())


# monitoring


def _create_channel(project: Project, command: Invocation) -> str:
    labels = command.pairs("--channel-labels")
    if command.text("--type") == "email" and not (labels and "@" in labels[0].get("email_address", "")):
        command.fail('INVALID_ARGUMENT: Field "notification_channel.labels[\'email_address\']" is not valid.')
    name = str(7000 + len(project.resources.of_kind("channel")))
    project.resources.add("channel", name, display_name=command.text("--display-name"))
    return f"Created notification channel [{project.path}/notificationChannels/{name}].\n"


def _named(kind: str, collection: str) -> Any:
    return lambda project, command: [
        {"name": f"{project.path}/{collection}/{one.name}", "displayName": one.attributes["display_name"]}
        for one in project.resources.of_kind(kind)]


def _create_policy(project: Project, command: Invocation) -> None:
    text = command.call.read(command.text("--policy-from-file")) if command.text("--policy-from-file") else ""
    policy = yaml.safe_load(text or command.text("--policy") or "{}")
    if not (policy.get("displayName") and policy.get("conditions") and policy.get("combiner")):
        command.fail("INVALID_ARGUMENT: Field alert_policy.conditions must have between 1 and 6 entries.")
    uses = set()
    for channel in command.words("--notification-channels"):
        number = channel.rpartition("/")[2]
        if project.resources.find("channel", number) is None:
            command.fail(f"NOT_FOUND: Cannot find notification channel with resource name: {channel}.")
        uses.add(("channel", number))
    name = str(9000 + len(project.resources.of_kind("policy")))
    project.resources.add("policy", name, uses=uses, display_name=policy["displayName"])


def _delete_named(kind: str, key: str) -> Any:
    def delete(project: Project, command: Invocation) -> str:
        name = command.name(key).rpartition("/")[2]
        if project.resources.find(kind, name) is None:
            command.fail("NOT_FOUND: Requested entity was not found.")
        users = project.resources.users_of((kind, name))
        if users:
            command.fail(f"FAILED_PRECONDITION: {kind} {name} is used by {users[0].name}")
        project.resources.remove(kind, name)
        return ""

    return delete


def _logins(project: Project, command: Invocation) -> list[JsonDict]:
    return [{"account": "owner@example.com", "status": "ACTIVE"}]


def _projects(project: Project, command: Invocation) -> list[JsonDict]:
    return [{"projectId": project.id, "projectNumber": project.number}]
