"""A Google Cloud project, by the gcloud command: identity, quotas, zones that have the machine, billing, budgets."""

from collections.abc import Iterator
from typing import Any

from embark.doctor.account.need import CheckFailed, CloudCli, Need, budget_check
from embark.doctor.check import Check
from embark.launch.shell import Shell


def check_gcp(need: Need, shell: Shell) -> Iterator[Check]:
    """The identity and the project first."""
    gcloud = CloudCli("gcp", shell)
    try:
        gcloud.require()
        project, account = _project(gcloud, need)
        yield Check("account", "ok", f"project {project} as {account}")
    except CheckFailed as failed:
        yield failed.check
        return
    for question in (_region_quota, _global_quotas, _offer, _billing):
        try:
            yield from question(gcloud, need, project)
        except CheckFailed as failed:
            yield failed.check


def _project(gcloud: CloudCli, need: Need) -> tuple[str, str]:
    accounts = gcloud.ask("account", "auth", "list", "--filter=status:ACTIVE")
    if not accounts:
        raise CheckFailed(Check("account", "wrong", "not logged in to Google Cloud", "a login", "gcloud auth login"))
    account, project = str(accounts[0].get("account")), need.job.spec.place.account
    if not project:
        config = gcloud.ask("account", "config", "list", "core/project") or {}
        project = str(config.get("core", {}).get("project", ""))
    if not project:
        raise CheckFailed(Check("account", "wrong", f"{account}, and no project", "a project that pays",
                                "set place.account, or gcloud config set project ID"))
    return project, account


def _region_quota(gcloud: CloudCli, need: Need, project: str) -> Iterator[Check]:
    region = gcloud.ask("quota", "compute", "regions", "describe", need.region, f"--project={project}")
    name, _ = need.quota
    rows = {row["metric"]: row for row in region.get("quotas", [])}
    if name in rows:
        yield _quota(rows[name], need, f"in {need.region}", project)
        return
    # Newer families are counted by a quota with dimensions, which this command does not show.
    yield Check(f"quota {name or need.job.machine.name}", "warning",
                f"gcloud compute does not list it in {need.region}", f"{need.num_units} {need.unit} free",
                "gcloud beta quotas info describe GPUS-PER-GPU-FAMILY-per-project-region "
                f"--service=compute.googleapis.com --project={project}")


def _global_quotas(gcloud: CloudCli, need: Need, project: str) -> Iterator[Check]:
    info = gcloud.ask("quota GPUS_ALL_REGIONS", "compute", "project-info", "describe", f"--project={project}")
    rows = {row["metric"]: row for row in info.get("quotas", [])}
    for name in need.job.machine.quota.also if need.job.machine.quota else ():
        if name in rows:
            yield _quota(rows[name], need, "in all regions", project)


def _quota(row: dict[str, Any], need: Need, where: str, project: str) -> Check:
    limit, used = float(row["limit"]), float(row["usage"])
    return need.quota_check(row["metric"], limit, used,
                            f"https://console.cloud.google.com/iam-admin/quotas?project={project}: ask for "
                            f"{used + need.num_units:g} of {row['metric']} {where}; it may take days")


def _offer(gcloud: CloudCli, need: Need, project: str) -> Iterator[Check]:
    rows = gcloud.ask("machine offered", "compute", "machine-types", "list", f"--project={project}",
                      f"--filter=name={need.location.machine_type} AND zone~^{need.region}-")
    yield need.offer_check(sorted(str(row.get("zone", "")).rsplit("/", 1)[-1] for row in rows))


def _billing(gcloud: CloudCli, _: Need, project: str) -> Iterator[Check]:
    billing = gcloud.ask("billing", "billing", "projects", "describe", project)
    if not billing.get("billingEnabled"):
        yield Check("billing", "wrong", f"project {project} has no billing account", "one that pays",
                    f"gcloud billing projects link {project} --billing-account=ID")
        return
    account = str(billing.get("billingAccountName", "")).rsplit("/", 1)[-1]
    budgets = gcloud.ask("budgets", "billing", "budgets", "list", f"--billing-account={account}")
    yield budget_check([(str(budget.get("displayName", "")), 0.0, 0.0) for budget in budgets])
