"""What a run may cost and whether it may start at all: budget alerts, and quotas looked at before anything is made."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

from embark.catalog import Quota
from embark.render.clouds.gcp.cluster import project_setting
from embark.render.file import File
from embark.render.job import Job
from embark.render.location import site_of
from embark.render.shell_text import (
    PRELUDE,
    Shell,
    command,
    comment,
    function,
    needed,
    option,
    output_of,
    quote,
    run,
    script,
    setting,
    variable,
    verbs,
)

THRESHOLDS = (50, 80, 100)
"""Percent of the budget at which a mail is sent."""
HOURS = 24
"""A budget is for a day of the run where the spec sets no end."""

_AWS_NOTIFICATION = Shell('"NotificationType=ACTUAL,ComparisonOperator=GREATER_THAN,Threshold=$percent,'
                          'ThresholdType=PERCENTAGE"')


def render_money(job: Job) -> list[File]:
    """`money.sh budget` and `money.sh quota`, and what the clouds want as files."""
    files = {"aws": _aws_files, "azure": _azure_files, "gcp": _no_files}[job.cloud](job)
    return [File("money.sh", _script(job), is_executable=True), *files]


def budget_usd(job: Job) -> int:
    """What all machines cost in `place.max_hours` or a day, rounded up to a number one remembers."""
    rate = job.usd_per_hour
    if rate is None:
        return 100
    total = rate * (job.spec.place.max_hours or HOURS)
    step = 10 ** max(1, math.floor(math.log10(max(total, 10))) - 1)
    return int(math.ceil(total / step) * step)


def needed_units(job: Job) -> int:
    """How much of its quota the run takes."""
    unit = job.machine.quota.unit if job.machine.quota else "GPU"
    if unit == "vCPU":
        return int((job.machine.vcpus or 0) * job.num_nodes)
    cores = 2 if unit == "core" else 1
    return job.machine.num_gpus * job.num_nodes * cores


def _script(job: Job) -> str:
    site = site_of(job)
    make: dict[str, Callable[[Job], tuple[list[str], str, str]]] = {
        "aws": _aws, "azure": _azure, "gcp": _gcp}
    settings, budget, quota = make[job.cloud](job)
    rate = job.usd_per_hour
    origin = job.price.origin
    told = "The catalog has no price of this machine."
    if rate is not None and origin is not None:
        way = "spot" if job.spec.place.spot else "on demand"
        told = (f"{job.num_nodes} x {job.machine.name} in {site.region}, {way}: ${rate:,.2f} an hour by the catalog "
                f"({origin.date}).")
    about = (f"Money and quotas. {told} money.sh quota says whether the machines may start; money.sh budget asks for "
             "a mail.")
    return script(
        about, "\n".join([*settings, setting("BUDGET_USD", str(budget_usd(job)), "A month's, for the alerts.")]),
        PRELUDE, 'cd "$(dirname "$0")"',
        function("enough", "Whether the quota named $1 has the $2 that the run takes; $3 is what it has.", _ENOUGH),
        function("quota", "Looks at the quotas that the run needs.", quota),
        function("budget", "A mail when the money goes. An alert stops nothing.", budget),
        verbs("quota", "budget", usage="quota | budget"),
    )


_ENOUGH = """\
local have=${3%%.*}
case $have in
  '' | None | *[!0-9-]*) printf '%s: not known from here; look in the console\\n' "$1" >&2; return 0 ;;
  -1) have=$2 ;;
esac
if [ "$have" -lt "$2" ]; then
  printf '%s: %s of the %s that the run takes. Ask for more; it may take days.\\n' "$1" "$have" "$2" >&2
  return 1
fi
printf '%s: %s, the run takes %s\\n' "$1" "$have" "$2\""""


def _quota_name(job: Job) -> tuple[str, str]:
    """What the cloud calls the quota, and its code; empty where the catalog does not know."""
    quota: Quota | None = job.machine.quota
    if quota is None:
        return "", ""
    return (quota.spot, quota.spot_code) if job.spec.place.spot else (quota.on_demand, quota.on_demand_code)


def _unknown(job: Job) -> str:
    return f"printf '%s\\n' {quote(f'The quota of {job.machine.name} has no name here: look in the console.')} >&2"


def _aws(job: Job) -> tuple[list[str], str, str]:
    site = site_of(job)
    name, code = _quota_name(job)
    settings = [setting("REGION", site.region)]
    budget_name = f"embark-{job.name}"
    account = output_of("aws", "sts", "get-caller-identity", "--query", "Account", "--output", "text")
    find = command("aws", "budgets", "describe-budget", "--account-id", Shell('"$account"'),
                   "--budget-name", budget_name)
    notify = run("aws", "budgets", "create-notification", "--account-id", Shell('"$account"'),
                 "--budget-name", budget_name, "--notification", _AWS_NOTIFICATION,
                 "--subscribers", Shell('"SubscriptionType=EMAIL,Address=$EMAIL"'), indent="    ")
    budget = f"""\
{needed("EMAIL", "where the mails go")}
local account percent
account=000000000000
if [ "$DRY_RUN" = 0 ]; then account={account}; fi
if ! {find} >/dev/null 2>&1; then
{run("aws", "budgets", "create-budget", "--account-id", Shell('"$account"'), "--budget",
     Shell('"$(sed "s/AMOUNT/$BUDGET_USD/" budget.json)"'), indent="  ")}
  for percent in {" ".join(str(t) for t in THRESHOLDS)}; do
{notify}
  done
fi"""
    if not code:
        return settings, budget, _unknown(job)
    value = output_of("aws", "service-quotas", "get-service-quota", "--region", variable("REGION"),
                      "--service-code", "ec2", "--quota-code", code, "--query", "Quota.Value", "--output", "text")
    more = command("aws", "service-quotas", "request-service-quota-increase", "--region", site.region,
                   "--service-code", "ec2", "--quota-code", code, "--desired-value", str(needed_units(job)))
    quota = f"{comment(f'To ask for more: {_flat(more)}')}\nenough {quote(name)} {needed_units(job)} {value}"
    return settings, budget, quota


def aws_budget(job: Job) -> dict[str, Any]:
    """For `aws budgets create-budget`; `money.sh` puts the amount in. Of the whole account: a filter by tag sees
    nothing until someone activates the tag for billing."""
    return {
        "BudgetName": f"embark-{job.name}",
        "BudgetLimit": {"Amount": "AMOUNT", "Unit": "USD"},
        "TimeUnit": "MONTHLY",
        "BudgetType": "COST",
    }


def _aws_files(job: Job) -> list[File]:
    return [File("budget.json", json.dumps(aws_budget(job), indent=2) + "\n")]


def _azure(job: Job) -> tuple[list[str], str, str]:
    site = site_of(job)
    name, code = _quota_name(job)
    settings = [setting("LOCATION", site.region), setting("RESOURCE_GROUP", site.cluster)]
    budget = f"""\
{needed("EMAIL", "where the mails go")}
{run("az", "deployment", "group", "create", "--resource-group", variable("RESOURCE_GROUP"), "--name",
     f"embark-budget-{job.name}", "--template-file", "budget.json", "--parameters", Shell('amount="$BUDGET_USD"'),
     Shell('email="$EMAIL"'), Shell('startDate="$(date +%Y-%m-01)"'))}"""
    if not name:
        return settings, budget, _unknown(job)
    match = f"name.value=='{code}'" if code else f"localName=='{name}'"
    value = output_of("az", "vm", "list-usage", "--location", variable("LOCATION"), "--query",
                      Shell(f'"[?{match}] | [0].limit"'), "--output", "tsv")
    return settings, budget, f"enough {quote(name)} {needed_units(job)} {value}"


def azure_budget(job: Job) -> dict[str, Any]:
    """An ARM template: `az consumption budget` cannot make alerts."""
    notifications = {
        f"at{percent}": {"enabled": True, "operator": "GreaterThan", "threshold": percent,
                         "contactEmails": ["[parameters('email')]"]}
        for percent in THRESHOLDS
    }
    return {
        "$schema": "https://schema.management.azure.com/schemas/2019-04-01/deploymentTemplate.json#",
        "contentVersion": "1.0.0.0",
        "parameters": {"amount": {"type": "int"}, "email": {"type": "string"}, "startDate": {"type": "string"}},
        "resources": [{
            "type": "Microsoft.Consumption/budgets", "apiVersion": "2023-11-01", "name": f"embark-{job.name}",
            "properties": {"category": "Cost", "amount": "[parameters('amount')]", "timeGrain": "Monthly",
                           "timePeriod": {"startDate": "[parameters('startDate')]"}, "notifications": notifications},
        }],
    }


def _azure_files(job: Job) -> list[File]:
    return [File("budget.json", json.dumps(azure_budget(job), indent=2) + "\n")]


def _gcp(job: Job) -> tuple[list[str], str, str]:
    site = site_of(job)
    name, _ = _quota_name(job)
    settings = [project_setting(job), setting("REGION", site.region)]
    account = output_of("gcloud", "billing", "projects", "describe", variable("PROJECT"),
                        option("--format", "value(billingAccountName.basename())"))
    there = output_of("gcloud", "billing", "budgets", "list", Shell('--billing-account="$account"'),
                      f"--filter=displayName=embark-{job.name}", option("--format", "value(name)"))
    make = run("gcloud", "billing", "budgets", "create", Shell('--billing-account="$account"'),
               f"--display-name=embark-{job.name}", Shell('--budget-amount="${BUDGET_USD}USD"'),
               Shell('--filter-projects="projects/$PROJECT"'),
               *(f"--threshold-rule=percent={percent / 100:g}" for percent in THRESHOLDS), indent="  ")
    budget = f"""\
# Mails go to those who administer the billing account.
local account=ACCOUNT
if [ "$DRY_RUN" = 0 ]; then account={account}; fi
if [ "$DRY_RUN" = 1 ] || [ -z {there} ]; then
{make}
fi"""
    return settings, budget, _gcp_quota(job, name)


def _gcp_quota(job: Job, name: str) -> str:
    metric, _, family = name.partition(", gpu_family ")
    if not metric:
        return _unknown(job)
    if family:
        rows = command(
            "gcloud", "beta", "quotas", "info", "describe", "GPUS-PER-GPU-FAMILY-per-project-region",
            "--service=compute.googleapis.com", option("--project", variable("PROJECT")),
            "--flatten=dimensionsInfos[]",
            option("--format", "value(dimensionsInfos.dimensions.region,dimensionsInfos.dimensions.gpu_family,"
                               "dimensionsInfos.details.value)"), indent="  ").strip()
        pick = f"awk -v region=\"$REGION\" '$1 == region && $2 == \"{family}\" {{ print $3 }}'"
        return f'enough {quote(name)} {needed_units(job)} "$({rows} |\n  {pick})"'
    region = ("compute", "regions", "describe", variable("REGION"))
    lines = [f"enough {quote(metric)} {needed_units(job)} {_gcp_limit(metric, *region)}"]
    for other in job.machine.quota.also if job.machine.quota else ():
        limit = _gcp_limit(other, "compute", "project-info", "describe")
        lines.append(f"enough {quote(other)} {needed_units(job)} {limit}")
    return "\n".join(lines)


def _gcp_limit(metric: str, *words: str) -> str:
    rows = command("gcloud", *words, option("--project", variable("PROJECT")), "--flatten=quotas[]",
                   option("--format", "value(quotas.metric,quotas.limit)"), indent="  ").strip()
    return f'"$({rows} |\n  awk \'$1 == "{metric}" {{ print $2 }}\')"'


def _no_files(job: Job) -> list[File]:
    return []


def _flat(text: str) -> str:
    return " ".join(text.replace("\\\n", " ").split())
