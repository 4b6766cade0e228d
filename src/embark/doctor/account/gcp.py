"""A Google Cloud project, by the gcloud command: who asks, quotas, zones that have the machine, billing, the bucket."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from typing import Any

from embark.doctor.account.bucket import bucket_check
from embark.doctor.account.need import Need, quota_check
from embark.doctor.check import Check, judged
from embark.formatting import to_one_line
from embark.launch.shell import CommandResult, Shell

_LOGIN = ("active account selected", "Reauthentication", "invalid_grant", "gcloud auth login", "credentials")
_DENIED = ("PERMISSION_DENIED", "does not have permission", "Required '")
_NO_PROJECT = ("project property", "not found", "valid project")
_DISABLED = ("SERVICE_DISABLED", "has not been used in project", "is disabled")


def gcp_account(need: Need, shell: Shell) -> Iterator[Check]:
    """Where it is not known who asks and which project pays, nothing else is asked."""
    if shutil.which("gcloud") is None:
        yield Check("account", "wrong", "gcloud, Google Cloud's command line, is not installed", "gcloud on the path",
                    "https://cloud.google.com/sdk/docs/install, then gcloud auth login")
        return
    project = need.job.spec.place.account
    accounts = _ask(shell, "account", "auth", "list", "--filter=status:ACTIVE")
    if isinstance(accounts, Check):
        yield accounts
        return
    if not accounts:
        yield Check("account", "wrong", "nobody is logged in to Google Cloud", "a login", "gcloud auth login")
        return
    if not project:
        told = _ask(shell, "account", "config", "list", "core/project")
        if isinstance(told, Check):
            yield told
            return
        project = str((told or {}).get("core", {}).get("project", ""))
    if not project:
        yield Check("account", "wrong", f"{accounts[0].get('account')}, and no project", "a project that pays",
                    "set place.account, or gcloud config set project ID")
        return
    yield Check("account", "ok", f"project {project} as {accounts[0].get('account')}")
    region = _ask(shell, "quota", "compute", "regions", "describe", need.region, f"--project={project}")
    yield from [region] if isinstance(region, Check) else _region_quota(region, need, project)
    everywhere = _ask(shell, "quota GPUS_ALL_REGIONS", "compute", "project-info", "describe", f"--project={project}")
    yield from [everywhere] if isinstance(everywhere, Check) else _global_quotas(everywhere, need, project)
    offered = _ask(shell, "machine offered", "compute", "machine-types", "list", f"--project={project}",
                   f"--filter=name={need.site.machine_type} AND zone~^{need.region}-")
    yield offered if isinstance(offered, Check) else _offered(offered, need)
    yield from _billing(shell, project)
    if (bucket := bucket_check(need.job.spec)) is not None:
        yield bucket


def _region_quota(told: Any, need: Need, project: str) -> Iterator[Check]:
    name, _ = need.quota
    rows = {row["metric"]: row for row in told.get("quotas", [])}
    if name in rows:
        yield _row(rows[name], need, f"in {need.region}", project)
        return
    # Newer families are counted by a quota with dimensions, which this command does not show.
    yield Check(f"quota {name or need.job.machine.name}", "warning", f"not told by gcloud compute for {need.region}",
                f"{need.num_units} {need.unit} free",
                "gcloud beta quotas info describe GPUS-PER-GPU-FAMILY-per-project-region "
                f"--service=compute.googleapis.com --project={project}")


def _global_quotas(told: Any, need: Need, project: str) -> Iterator[Check]:
    rows = {row["metric"]: row for row in told.get("quotas", [])}
    for name in need.job.machine.quota.also if need.job.machine.quota else ():
        if name in rows:
            yield _row(rows[name], need, "in all regions", project)


def _row(row: dict[str, Any], need: Need, where: str, project: str) -> Check:
    fix = (f"https://console.cloud.google.com/iam-admin/quotas?project={project}: ask for "
           f"{float(row['usage']) + need.num_units:g} of {row['metric']} {where}; it may take days")
    return quota_check(need, row["metric"], float(row["limit"]), float(row["usage"]), need.num_units, fix)


def _offered(told: Any, need: Need) -> Check:
    zones = sorted(str(row.get("zone", "")).rsplit("/", 1)[-1] for row in told)
    machine, zone = need.site.machine_type, need.job.spec.place.zone
    if not zones:
        return Check("machine offered", "wrong", f"no {machine} in {need.region}", f"{machine} in {need.region}",
                     f"another place.region: {need.other_regions()}")
    return judged("machine offered", not zone or zone in zones, f"{machine} in {', '.join(zones)}",
                  f"in {zone or need.region}", f"set place.zone to one of {', '.join(zones)}")


def _billing(shell: Shell, project: str) -> Iterator[Check]:
    told = _ask(shell, "billing", "billing", "projects", "describe", project)
    if isinstance(told, Check):
        yield told
        return
    if not told.get("billingEnabled"):
        yield Check("billing", "wrong", f"project {project} has no billing account", "one that pays",
                    f"gcloud billing projects link {project} --billing-account=ID")
        return
    account = str(told.get("billingAccountName", "")).rsplit("/", 1)[-1]
    budgets = _ask(shell, "budgets", "billing", "budgets", "list", f"--billing-account={account}")
    if isinstance(budgets, Check):
        yield budgets
        return
    names = [str(budget.get("displayName", "")) for budget in budgets]
    yield judged("budgets", bool(names), ", ".join(names) or "none: nobody is told when the money goes", "one",
                 "EMAIL=you@example.com ./money.sh budget, in the folder that embark render writes", bad="warning")


def _ask(shell: Shell, name: str, *words: str) -> Any:
    """What gcloud answers, or a check that says why it does not."""
    done = shell.ask(["gcloud", *words, "--format=json", "--quiet"], timeout_s=120)
    if not done.is_ok:
        return _refused(name, done)
    try:
        return json.loads(done.out or "[]")
    except ValueError:
        return Check(name, "warning", f"gcloud's answer is no JSON: {to_one_line(done.out)[:100]}", "JSON",
                     "gcloud components update")


def _refused(name: str, done: CommandResult) -> Check:
    said = to_one_line(done.err)
    if done.has_timed_out:
        return Check(name, "wrong", "gcloud did not answer in time", "an answer", "the network, or a proxy")
    if any(word in said for word in _DISABLED):
        return Check(name, "wrong", "the API is not enabled in this project", "enabled",
                     "gcloud services enable compute.googleapis.com")
    if any(word in said for word in _DENIED):
        return Check(name, "warning", f"not known: this identity may not ask ({said[:160]})", "the role Viewer",
                     "an administrator can grant roles/compute.viewer and roles/billing.viewer")
    if any(word in said for word in _LOGIN):
        return Check(name, "wrong", "not logged in to Google Cloud, or the login has expired", "a login that holds",
                     "gcloud auth login, and gcloud auth application-default login for the bucket")
    if any(word in said for word in _NO_PROJECT):
        return Check(name, "wrong", f"gcloud refused: {said[:200]}", "a project and region that are there",
                     "set place.account to the project's id, and place.region")
    return Check(name, "warning", f"gcloud refused: {said[:240]}", "an answer", "ask again, or look in the console")
