"""Budget alerts, and quotas that are checked before anything is created."""

from __future__ import annotations

import json
import math
from typing import Any

from embark.render.file import File
from embark.render.job import Job
from embark.render.scripts import script_file
from embark.render.shell_text import Shell

SCRIPT = "budget.sh"
THRESHOLDS = (50, 80, 100)
"""Percent of the budget at which a mail is sent."""
HOURS = 24
"""A budget is for a day of the run where the spec sets no end."""


def render_budget(job: Job) -> list[File]:
    """`budget.sh quota` and `budget.sh budget`, and the file that the cloud wants."""
    quota = job.machine.quota
    name, code = ("", "") if quota is None else (
        (quota.spot, quota.spot_code) if job.is_spot else (quota.on_demand, quota.on_demand_code))
    about = (f"Budget and quotas. {price_text(job)} {SCRIPT} quota says whether the machines may start; "
             f"{SCRIPT} budget sets up alerts by mail.")
    documents = {"aws": aws_budget, "azure": azure_budget}
    return [
        script_file(SCRIPT, f"{job.cloud}/budget.sh.j2", job, about=about, budget_usd=budget_usd(job),
                    quota_name=name, quota_code=code, needed=needed_units(job),
                    thresholds=Shell(" ".join(map(str, THRESHOLDS))),
                    unknown_quota=f"The quota of {job.machine.name} has no name here: see the console."),
        *([File("budget.json", json.dumps(documents[job.cloud](job), indent=2) + "\n")]
          if job.cloud in documents else []),
    ]


def price_text(job: Job) -> str:
    price = job.price
    if price.usd_per_hour is None or price.origin is None:
        return "The catalog has no price for this machine."
    return f"{price.title}: {price.usd_per_hour:,.2f} USD an hour by the catalog ({price.origin.date})."


def budget_usd(job: Job) -> int:
    """What all machines cost in `place.max_hours` or a day, rounded up."""
    rate = job.usd_per_hour
    if rate is None:
        return 100
    total = rate * (job.spec.place.max_hours or HOURS)
    step = 10 ** max(1, math.floor(math.log10(max(total, 10))) - 1)
    return int(math.ceil(total / step) * step)


def needed_units(job: Job) -> int:
    """How much of its quota the run needs."""
    unit = job.machine.quota.unit if job.machine.quota else "GPU"
    if unit == "vCPU":
        return int((job.machine.vcpus or 0) * job.num_nodes)
    return job.machine.num_gpus * job.num_nodes * (2 if unit == "core" else 1)


def aws_budget(job: Job) -> dict[str, Any]:
    """For `aws budgets create-budget`; `budget.sh` substitutes the amount. For the whole account: a filter by tag sees
    nothing until the tag is activated for billing."""
    return {"BudgetName": f"embark-{job.name}", "BudgetLimit": {"Amount": "AMOUNT", "Unit": "USD"},
            "TimeUnit": "MONTHLY", "BudgetType": "COST"}


def azure_budget(job: Job) -> dict[str, Any]:
    """An ARM template: `az consumption budget` cannot create alerts."""
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
