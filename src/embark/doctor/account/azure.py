"""An Azure subscription, by the az command: who it is, quotas, whether the machine is sold to it, budgets, store."""

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

_LOGIN = ("az login", "AADSTS", "refresh token has expired", "InvalidAuthenticationToken", "ExpiredAuthenticationToken")
_DENIED = ("AuthorizationFailed", "does not have authorization", "Forbidden")


def azure_account(need: Need, shell: Shell) -> Iterator[Check]:
    """Where it is not known who asks, nothing else is asked."""
    if shutil.which("az") is None:
        yield Check("account", "wrong", "az, Azure's command line, is not installed", "az on the path",
                    "pip install azure-cli, then az login")
        return
    who = _ask(shell, "account", "account", "show")
    if isinstance(who, Check):
        yield who
        return
    yield _identity(who, need)
    usage = _ask(shell, "quota", "vm", "list-usage", "--location", need.region)
    yield from [usage] if isinstance(usage, Check) else _quotas(usage, need)
    skus = _ask(shell, "machine offered", "vm", "list-skus", "--location", need.region, "--size",
                need.site.machine_type, "--all")
    yield skus if isinstance(skus, Check) else _offered(skus, need)
    budgets = _ask(shell, "budgets", "consumption", "budget", "list")
    yield budgets if isinstance(budgets, Check) else _budgets(budgets)
    if (bucket := bucket_check(need.job.spec)) is not None:
        yield bucket


def _identity(told: Any, need: Need) -> Check:
    wanted = need.job.spec.place.account
    found = f"{told.get('name')} ({told.get('id')}) as {told.get('user', {}).get('name')}"
    if told.get("state", "Enabled") != "Enabled":
        return Check("account", "wrong", f"{found}: {told['state']}", "Enabled", "the subscription's owner can mend it")
    return judged("account", not wanted or wanted in (told.get("id"), told.get("name")), found,
                  f"subscription {wanted}" if wanted else "", f"az account set --subscription {wanted}")


def _quotas(told: Any, need: Need) -> Iterator[Check]:
    """The family's own, and what all families of the region share."""
    rows = {str(row["name"]["value"]).lower(): row for row in told}
    name, code = need.quota
    fix = (f"az quota update, or https://portal.azure.com/#view/Microsoft_Azure_Capacity/QuotaMenuBlade: {name} in "
           f"{need.region}; it may take days")
    # Spot counts to one number for all families; on demand to the family's and to the region's.
    for key, label in ((code, name), ("cores", "Total Regional vCPUs")) if not need.job.is_spot else ((code, name),):
        row = rows.get(key.lower())
        if row is None:
            yield Check(f"quota {label or need.job.machine.name}", "warning",
                        f"{key or 'its name'} is not among the quotas of {need.region}", "a quota of that name",
                        "az vm list-usage lists them; a machine that is not sold there has none")
        else:
            yield quota_check(need, label, float(row["limit"]), float(row["currentValue"]), need.num_units, fix)


def _offered(told: Any, need: Need) -> Check:
    machine = need.site.machine_type
    rows = [row for row in told if row.get("name") == machine]
    if not rows:
        return Check("machine offered", "wrong", f"no {machine} in {need.region}", f"{machine} in {need.region}",
                     f"another place.region: {need.other_regions()}")
    barred = [limit for limit in rows[0].get("restrictions", []) if limit.get("type") == "Location"]
    if barred:
        return Check("machine offered", "wrong", f"{machine} in {need.region}: {barred[0].get('reasonCode')}",
                     "sold to this subscription", "ask for access in the portal (a support request for the family and "
                     f"the region), or another place.region: {need.other_regions()}")
    zones = sorted({zone for info in rows[0].get("locationInfo", []) for zone in info.get("zones") or []})
    return Check("machine offered", "ok", f"{machine} in {need.region}"
                 + (f", zones {', '.join(zones)}" if zones else ""))


def _budgets(told: Any) -> Check:
    rows, passed = [], False
    for budget in told:
        limit, spent = float(budget.get("amount") or 0), float((budget.get("currentSpend") or {}).get("amount") or 0)
        passed = passed or bool(limit and spent >= limit)
        rows.append(f"{budget.get('name')}: {spent:,.0f} of {limit:,.0f}")
    if not rows:
        return Check("budgets", "warning", "none: nobody is told when the money goes", "one",
                     "EMAIL=you@example.com ./money.sh budget, in the folder that embark render writes")
    return judged("budgets", not passed, "; ".join(rows), "none used up", "an alert stops nothing: look at the bill",
                  bad="warning")


def _ask(shell: Shell, name: str, *words: str) -> Any:
    """What az answers, or a check that says why it does not."""
    done = shell.ask(["az", *words, "--output", "json", "--only-show-errors"], timeout_s=120)
    if not done.is_ok:
        return _refused(name, done)
    try:
        return json.loads(done.out or "[]")
    except ValueError:
        return Check(name, "warning", f"az's answer is no JSON: {to_one_line(done.out)[:100]}", "JSON", "az upgrade")


def _refused(name: str, done: CommandResult) -> Check:
    said = to_one_line(done.err)
    if done.has_timed_out:
        return Check(name, "wrong", "az did not answer in time", "an answer", "the network, or a proxy")
    if any(word in said for word in _LOGIN):
        return Check(name, "wrong", "not logged in to Azure, or the login has expired", "a login that holds",
                     "az login")
    if any(word in said for word in _DENIED):
        return Check(name, "warning", f"not known: this identity may not ask ({said[:160]})", "the role Reader",
                     "an administrator can grant Reader on the subscription")
    return Check(name, "warning", f"az refused: {said[:240]}", "an answer", "ask again, or look in the portal")
