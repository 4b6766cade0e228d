"""What watches a run and its machines: agents, metrics, alarms for idle GPUs and dead machines, budgets and quotas."""

import math
from collections.abc import Iterator

from embark.catalog import Quota, load_catalog
from embark.events.metrics import METRICS, TRAINING_GROUPS
from embark.events.monitoring import IDLE_MINUTES, IDLE_PERCENT, alert_rules, alerts, dashboard_text
from embark.kubernetes.names import COMPLETION_INDEX, REPLICA_INDEX
from embark.values import frozen
from .folder import File, Files
from .job import POD_TARGETS, Job
from .shell_text import Words, job_text, script_file, variable

OBJECTS = "run_metrics.yaml"
DASHBOARD = "grafana_dashboard.json"
FIRST = {COMPLETION_INDEX: "0"}  # Rank 0 alone answers, and it runs in the first pod.
_FIRST_POD = {"job": FIRST, "jobset": FIRST, "trainjob": FIRST,
              "pytorchjob": {REPLICA_INDEX: "0"}}
MONITOR_RESOURCES = {"aws": "podmonitors.monitoring.coreos.com", "azure": "podmonitors.azmonitoring.coreos.com",
                     "gcp": "podmonitorings.monitoring.googleapis.com", "": "podmonitors.monitoring.coreos.com"}
POLICIES = ("idle_gpus", "dead_machines")  # Alert policies of Google Cloud.
PROMETHEUS_RELEASE = "kube-prometheus-stack"  # The operator reads objects whose label `release` has this value.
BUDGET_SCRIPT = "budget.sh"
BUDGET_HOURS = 24  # A budget is for a day of the run if the spec sets no end.


def render_monitoring(job: Job) -> Files:
    """Write `monitoring.sh`, and the files it hands to the cloud's agents."""
    text = script_file(
        "monitoring.sh", f"{job.cloud}/monitoring.sh.j2", job, idle_minutes=IDLE_MINUTES, idle_percent=IDLE_PERCENT,
        is_scraped=is_scraped(job), metrics_file=OBJECTS, dashboard=DASHBOARD,
        monitor_resource=MONITOR_RESOURCES[job.cloud], policies=POLICIES, prometheus_release=PROMETHEUS_RELEASE,
        sends_to_cloudwatch=sends_to_cloudwatch(job))
    is_vm = job.target == "vm"
    templates = {("aws", True): ["cloudwatch_agent.json"], ("azure", False): ["dcgm_pod_monitor.yaml"],
                 ("gcp", True): ["ops_agent.yaml"]}.get((job.cloud, is_vm), [])
    files = [File(name, job_text(f"{job.cloud}/{name}.j2", job)) for name in templates]
    if job.cloud == "azure" and not is_vm:
        files.append(File("alert_rules.json", job_text(
            "azure/alert_rules.json.j2", job, alerts=alerts() if is_scraped(job) else [], idle_minutes=IDLE_MINUTES,
            idle_percent=IDLE_PERCENT)))
    if job.cloud == "gcp":
        files += [File(f"{name}.json", job_text(f"gcp/{name}.json.j2", job, idle_minutes=IDLE_MINUTES,
                                                idle_percent=IDLE_PERCENT)) for name in POLICIES]
    return [text, *files, *render_run_metrics(job)]


def render_budget(job: Job) -> Files:
    """Write `budget.sh`, and the file that the cloud wants."""
    name, code = quota_name(job)
    about = (f"Budget and quotas. {job.price_text} {BUDGET_SCRIPT} quota says whether the machines may start; "
             f"{BUDGET_SCRIPT} budget sets up alerts by mail.")
    return [
        script_file(BUDGET_SCRIPT, f"{job.cloud}/budget.sh.j2", job, about=about, budget_usd=budget_usd(job),
                    quota_name=name, quota_code=code, needed=needed_units(job),
                    cloud_quotas=list(cloud_quotas(job)), also=(quota.also if (quota := quota_of(job)) else ()),
                    unknown_quota=f"The quota of {job.machine.name} has no name in the catalog: look in the console"),
        # The budget is the whole account's: a filter by tag sees nothing until the tag is activated for billing.
        *([File("budget.json", job_text(f"{job.cloud}/budget.json.j2", job))] if job.cloud != "gcp" else [])
    ]


def is_scraped(job: Job) -> bool:
    return bool(job.spec.watch.prometheus_port) and job.target in POD_TARGETS


def render_run_metrics(job: Job) -> Files:
    """Write the objects and the dashboard of the run's metrics, if it has any."""
    files: Files = []
    if is_scraped(job):
        labels = {**job.labels, "release": PROMETHEUS_RELEASE} if job.cloud == "aws" else job.labels
        text = job_text("run_metrics.yaml.j2", job, labels=labels, first_pod=_FIRST_POD.get(job.target, {}),
                        rules=alert_rules())
        files += [File(OBJECTS, text), File(DASHBOARD, dashboard_text())]
    if sends_to_cloudwatch(job):
        shown = [one for group in TRAINING_GROUPS for one in METRICS if one.group == group]
        name = "cloudwatch_dashboard.json"
        files.append(File(name, job_text(f"aws/{name}.j2", job, metrics=shown)))
    return files


def sends_to_cloudwatch(job: Job) -> bool:
    return job.cloud == "aws" and "cloudwatch" in job.spec.watch.sinks


def budget_usd(job: Job) -> int:
    """Return what all machines cost in `place.max_hours` or a day, rounded up."""
    rate = job.usd_per_hour
    if rate is None:
        return 100
    total = rate * (job.place.max_hours or BUDGET_HOURS)
    step = 10 ** max(1, math.floor(math.log10(max(total, 10))) - 1)
    return int(math.ceil(total / step) * step)


@frozen
class CloudQuota:
    """A quota that `gcloud beta quotas info list` shows, with the zone or region and the dimension that count."""

    name: str
    service: str
    filter: str
    is_zonal: bool
    dimension: str  # `gpu_family`, `tpu_family`, or empty.
    value: str

    @property
    def words(self) -> Words:
        """Arguments of the function of budget.sh that reads it."""
        place = variable("ZONE" if self.is_zonal else "REGION")
        return (self.service, self.filter, place, *((self.dimension, self.value) if self.value else ()))


def quota_of(job: Job) -> Quota | None:
    """Return the quota of its machines; Vertex AI and the Cloud TPU API have their own."""
    own = job.machine.quota
    if own is None:
        return None
    name = {"vertex": own.vertex, "tpu-vm": own.tpu_vm}.get(job.target, "")
    if job.target == "vertex" and not name:
        return None
    return load_catalog().quotas[name] if name else own


def quota_name(job: Job) -> tuple[str, str]:
    """Return the cloud's name for the quota and its code; empty if the catalog does not know them."""
    quota = quota_of(job)
    if quota is None:
        return "", ""
    return (quota.spot, quota.spot_code) if job.is_spot else (quota.on_demand, quota.on_demand_code)


def needed_units(job: Job) -> int:
    """Return how much of its quota the run needs."""
    quota = quota_of(job)
    unit = quota.unit if quota else "GPU"
    if unit == "vCPU":
        return int((job.machine.vcpus or 0) * job.num_nodes)
    return job.machine.num_gpus * job.num_nodes * (2 if unit == "core" else 1)


def cloud_quotas(job: Job) -> Iterator[CloudQuota]:
    """Google's quotas that have a code, or a metric of another service than Compute Engine."""
    quota, (name, code) = quota_of(job), quota_name(job)
    if quota is None or not (code or "/" in name):
        return
    dimension, _, value = quota.dimension.partition("=")
    if not code:
        yield CloudQuota(name, name.partition("/")[0], f"metric={name}", False, dimension, value)
        return
    # The Cloud TPU API counts in the zone, and all zones of the region together.
    for one in dict.fromkeys((code, code.replace("PerZone", "PerRegion"))):
        label = f"{name}, {quota.dimension}" if value else one if one != code else name
        yield CloudQuota(label, quota.service, f"quotaId={one}", "PerZone" in one, dimension, value)
