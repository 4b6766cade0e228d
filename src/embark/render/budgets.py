"""Budget alerts, and quotas that are checked before anything is created."""

import math

from embark.render.file import File
from embark.render.job import Job
from embark.render.scripts import job_text, script_file

SCRIPT = "budget.sh"
HOURS = 24
"""A budget is for a day of the run where the spec sets no end."""


def render_budget(job: Job) -> list[File]:
    """`budget.sh quota` and `budget.sh budget`, and the file that the cloud wants."""
    quota = job.machine.quota
    name, code = ("", "") if quota is None else (
        (quota.spot, quota.spot_code) if job.is_spot else (quota.on_demand, quota.on_demand_code))
    about = (f"Budget and quotas. {price_text(job)} {SCRIPT} quota says whether the machines may start; "
             f"{SCRIPT} budget sets up alerts by mail.")
    return [
        script_file(SCRIPT, f"{job.cloud}/budget.sh.j2", job, about=about, budget_usd=budget_usd(job),
                    quota_name=name, quota_code=code, needed=needed_units(job),
                    unknown_quota=f"The quota of {job.machine.name} has no name here: see the console."),
        # The budget is the whole account's: a filter by tag sees nothing until the tag is activated for billing.
        *([File("budget.json", job_text(f"{job.cloud}/budget.json.j2", job))] if job.cloud != "gcp" else []),
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
