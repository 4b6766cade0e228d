"""What watches the machines while a run goes: agents, and alarms for the two ways money is lost, idle GPUs and dead
machines."""

import json
from typing import Any

from embark.events.alerts import IDLE_MINUTES, IDLE_PERCENT, alerts
from embark.render.file import File
from embark.render.job import Job
from embark.render.location import location_of
from embark.render.run_metrics import (
    DASHBOARD,
    MONITOR_RESOURCES,
    OBJECTS,
    is_scraped,
    render_run_metrics,
    sends_to_cloudwatch,
)
from embark.render.scripts import job_text, script_file


def render_monitoring(job: Job) -> list[File]:
    """`monitoring.sh`, and the files it hands to the cloud's agents."""
    text = script_file(
        "monitoring.sh", f"{job.cloud}/monitoring.sh.j2", job, idle_minutes=IDLE_MINUTES, idle_percent=IDLE_PERCENT,
        is_scraped=is_scraped(job), metrics_file=OBJECTS, dashboard=DASHBOARD,
        monitor_resource=MONITOR_RESOURCES[job.cloud], sends_to_cloudwatch=sends_to_cloudwatch(job))
    is_vm = job.spec.place.target == "vm"
    templates = {("aws", True): ["cloudwatch_agent.json"], ("azure", False): ["dcgm_pod_monitor.yaml"],
                 ("gcp", True): ["ops_agent.yaml"]}.get((job.cloud, is_vm), [])
    files = [File(name, job_text(f"{job.cloud}/{name}.j2", job)) for name in templates]
    if job.cloud == "azure" and not is_vm:
        files.append(File("alert_rules.json", json.dumps(azure_rules(job), indent=2) + "\n"))
    if job.cloud == "gcp":
        files.append(File("idle_gpus.json", json.dumps(gcp_policy(job), indent=2) + "\n"))
    return [text, *files, *render_run_metrics(job)]


def azure_rules(job: Job) -> dict[str, Any]:
    """An ARM template with a rule group of Prometheus, which `az` alone cannot make."""
    def rule(name: str, expression: str, minutes: int, what: str) -> dict[str, Any]:
        return {"alert": name, "expression": expression, "for": f"PT{minutes}M", "severity": 2, "enabled": True,
                "annotations": {"description": what}, "actions": [{"actionGroupId": "[parameters('actionGroup')]"}]}

    rules = [
        rule("IdleGpus", f"avg(DCGM_FI_DEV_GPU_UTIL) < {IDLE_PERCENT}", IDLE_MINUTES,
             "Machines are paid for and do not train."),
        rule("FailedPods", f'sum(kube_pod_status_phase{{namespace="{job.namespace}",phase="Failed"}}) > 0', 5,
             "A pod of the run has failed."),
        rule("DeadMachines", 'sum(kube_node_status_condition{condition="Ready",status!="true"}) > 0', 5,
             "A machine of the cluster does not answer."),
    ]
    if is_scraped(job):
        rules += [rule(one.name, one.expression, max(1, one.minutes), one.what) for one in alerts()]
    return {
        "$schema": "https://schema.management.azure.com/schemas/2019-04-01/deploymentTemplate.json#",
        "contentVersion": "1.0.0.0",
        "parameters": {"workspace": {"type": "string"}, "cluster": {"type": "string"},
                       "actionGroup": {"type": "string"}, "location": {"type": "string"}},
        "resources": [{
            "type": "Microsoft.AlertsManagement/prometheusRuleGroups", "apiVersion": "2023-03-01",
            "name": f"embark-{job.name}", "location": "[parameters('location')]",
            "properties": {"enabled": True, "interval": "PT1M", "scopes": ["[parameters('workspace')]",
                           "[parameters('cluster')]"], "rules": rules},
        }],
    }


def gcp_policy(job: Job) -> dict[str, Any]:
    """An alert policy of Cloud Monitoring."""
    if job.spec.place.target == "vm":
        query = f"avg(agent_googleapis_com:gpu_utilization) < {IDLE_PERCENT}"
    else:
        query = f'avg(DCGM_FI_DEV_GPU_UTIL{{cluster="{location_of(job).cluster}"}}) < {IDLE_PERCENT}'
    return {
        "displayName": f"embark-{job.name}-idle-gpus",
        "documentation": {"content": "Machines are paid for and do not train.", "mimeType": "text/markdown"},
        "combiner": "OR",
        "conditions": [{
            "displayName": f"GPUs under {IDLE_PERCENT} % for {IDLE_MINUTES} minutes",
            "conditionPrometheusQueryLanguage": {"query": query, "duration": f"{IDLE_MINUTES * 60}s",
                                                 "evaluationInterval": "60s"},
        }],
    }
