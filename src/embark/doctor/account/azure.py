"""An Azure subscription, by the az command: identity, quotas, machines on sale, budgets."""

from collections.abc import Iterator

from embark.doctor.account.need import CheckFailed, CloudCli, Need, budget_check
from embark.doctor.check import Check, check
from embark.launch.shell import Shell


def check_azure(need: Need, shell: Shell) -> Iterator[Check]:
    """The identity first."""
    az = CloudCli("azure", shell)
    for question in (_identity, _quotas, _offer, _budgets):
        try:
            yield from question(az, need)
        except CheckFailed as failed:
            yield failed.check


def _identity(az: CloudCli, need: Need) -> Iterator[Check]:
    az.require()
    account = az.ask("account", "account", "show")
    wanted = need.job.spec.place.account
    found = f"{account.get('name')} ({account.get('id')}) as {account.get('user', {}).get('name')}"
    if account.get("state", "Enabled") != "Enabled":
        yield Check("account", "wrong", f"{found}: {account['state']}", "Enabled",
                    "ask the subscription's owner to enable it")
        return
    yield check("account", not wanted or wanted in (account.get("id"), account.get("name")), found,
                f"subscription {wanted}" if wanted else "", f"az account set --subscription {wanted}")


def _quotas(az: CloudCli, need: Need) -> Iterator[Check]:
    """Spot counts towards one number for all families; on demand towards the family's and the region's."""
    usage = az.ask("quota", "vm", "list-usage", "--location", need.region)
    rows = {str(row["name"]["value"]).lower(): row for row in usage}
    name, code = need.quota
    fix = (f"az quota update, or https://portal.azure.com/#view/Microsoft_Azure_Capacity/QuotaMenuBlade: {name} in "
           f"{need.region}; it may take days")
    for key, label in ((code, name), ("cores", "Total Regional vCPUs"))[: 1 if need.job.is_spot else 2]:
        row = rows.get(key.lower())
        if row is None:
            yield Check(f"quota {label or need.job.machine.name}", "warning",
                        f"{key or 'its name'} is not among the quotas of {need.region}", "a quota of that name",
                        "az vm list-usage lists them; a machine that is not sold there has none")
        else:
            yield need.quota_check(label, float(row["limit"]), float(row["currentValue"]), fix)


def _offer(az: CloudCli, need: Need) -> Iterator[Check]:
    machine = need.location.machine_type
    skus = az.ask("machine offered", "vm", "list-skus", "--location", need.region, "--size", machine, "--all")
    rows = [row for row in skus if row.get("name") == machine]
    barred = [limit for row in rows[:1] for limit in row.get("restrictions", []) if limit.get("type") == "Location"]
    if not rows:
        yield need.not_offered(f"no {machine} in {need.region}")
    elif barred:
        yield need.not_offered(f"{machine} in {need.region}: {barred[0].get('reasonCode')}",
                               "request access in the portal (a support request for the family and the region), or ")
    else:
        zones = sorted({zone for info in rows[0].get("locationInfo", []) for zone in info.get("zones") or []})
        yield Check("machine offered", "ok", f"{machine} in {need.region}"
                    + (f", zones {', '.join(zones)}" if zones else ""))


def _budgets(az: CloudCli, _: Need) -> Iterator[Check]:
    budgets = az.ask("budgets", "consumption", "budget", "list")
    yield budget_check([(str(one.get("name")), float(one.get("amount") or 0),
                         float((one.get("currentSpend") or {}).get("amount") or 0)) for one in budgets])
