"""What watches the machines while a run goes: agents, and alarms for the two ways money is lost, idle GPUs and dead
machines."""

from __future__ import annotations

import json
from typing import Any

from embark.events.alerts import IDLE_MINUTES, IDLE_PERCENT, alerts
from embark.render.clouds.gcp.cluster import project_setting
from embark.render.file import File
from embark.render.job import Job
from embark.render.location import site_of
from embark.render.run_metrics import apply_run_metrics, is_scraped, render_run_metrics
from embark.render.shell_text import (
    PRELUDE,
    Shell,
    command,
    needed,
    option,
    output_of,
    run,
    script,
    setting,
    unless,
    variable,
)
from embark.render.targets.vm_node import LOG
from embark.render.yaml_text import note, yaml_text


def render_monitoring(job: Job) -> list[File]:
    """`monitoring.sh`, and the files it hands to the cloud's agents."""
    return [*{"aws": _aws, "azure": _azure, "gcp": _gcp}[job.cloud](job), *render_run_metrics(job)]


def is_vm(job: Job) -> bool:
    return job.spec.place.target in ("vm", "tpu-vm")


def cloudwatch_agent(job: Job) -> dict[str, Any]:
    """The agent's own file on a plain machine: GPUs, memory, disk and the run's log."""
    return {
        "agent": {"metrics_collection_interval": 60, "run_as_user": "root"},
        "metrics": {
            "namespace": "Embark",
            "append_dimensions": {"InstanceId": "${aws:InstanceId}"},
            "metrics_collected": {
                "nvidia_gpu": {"measurement": ["utilization_gpu", "memory_used", "temperature_gpu", "power_draw"]},
                "mem": {"measurement": ["mem_used_percent"]},
                "disk": {"measurement": ["used_percent"], "resources": ["/", "/var/lib/embark"]},
            },
        },
        "logs": {"logs_collected": {"files": {"collect_list": [
            {"file_path": LOG, "log_group_name": f"/embark/{job.name}", "log_stream_name": "{instance_id}",
             "retention_in_days": 30}]}}},
    }


def _aws(job: Job) -> list[File]:
    region = ("--region", variable("REGION"))
    site = site_of(job)
    topic = run("aws", "sns", "create-topic", *region, "--name", f"embark-{job.name}")
    arn = output_of("aws", "sns", "create-topic", *region, "--name", f"embark-{job.name}", "--query", "TopicArn",
                    "--output", "text")
    subscribe = run("aws", "sns", "subscribe", *region, "--topic-arn", Shell('"$TOPIC"'), "--protocol", "email",
                    "--notification-endpoint", variable("EMAIL"))
    metric = ("Embark", "nvidia_smi_utilization_gpu") if is_vm(job) else ("ContainerInsights", "node_gpu_utilization")
    dimensions = [] if is_vm(job) else ["--dimensions", Shell('"Name=ClusterName,Value=$CLUSTER"')]
    idle = _alarm(f"embark-{job.name}-idle-gpus", *metric, dimensions, "LessThanThreshold", IDLE_PERCENT,
                  IDLE_MINUTES // 5, "Machines are paid for and do not train.")
    parts = [idle]
    if not is_vm(job):
        parts.append(_alarm(f"embark-{job.name}-dead-machines", "ContainerInsights", "cluster_failed_node_count",
                            dimensions, "GreaterThanThreshold", 0, 1, "A machine of the cluster does not answer."))
    text = script(
        "CloudWatch: a mail when GPUs stand idle or a machine is dead. The agents are those of eks_cluster.yaml, or on "
        "plain machines the one that cloudwatch_agent.json tells what to send.",
        "\n".join([setting("REGION", site.region), setting("CLUSTER", site.cluster),
                   needed("EMAIL", "where the mails go")]),
        PRELUDE, 'cd "$(dirname "$0")"',
        f"{topic}\nTOPIC=dry-run\nif [ \"$DRY_RUN\" = 0 ]; then TOPIC={arn}; fi\n{subscribe}",
        *parts,
        *([_aws_agent(job)] if is_vm(job) else []),
        *apply_run_metrics(job),
    )
    files = [File("monitoring.sh", text, is_executable=True)]
    if is_vm(job):
        files.append(File("cloudwatch_agent.json", json.dumps(cloudwatch_agent(job), indent=2) + "\n"))
    return files


def _alarm(name: str, namespace: str, metric: str, dimensions: list[str], comparison: str, threshold: int,
           num_periods: int, what: str) -> str:
    return run("aws", "cloudwatch", "put-metric-alarm", "--region", variable("REGION"), "--alarm-name", name,
               "--alarm-description", what, "--namespace", namespace, "--metric-name", metric, *dimensions,
               "--statistic", "Average", "--period", "300", "--evaluation-periods", str(num_periods),
               "--threshold", str(threshold), "--comparison-operator", comparison,
               "--treat-missing-data", "notBreaching", "--alarm-actions", Shell('"$TOPIC"'))


def _aws_agent(job: Job) -> str:
    parameter = f"AmazonCloudWatch-embark-{job.name}"
    targets = f"Key=tag:embark-run,Values={job.name}"
    configure = json.dumps({"action": ["configure"], "mode": ["ec2"], "optionalConfigurationSource": ["ssm"],
                            "optionalConfigurationLocation": [parameter], "optionalRestart": ["yes"]})
    return "\n".join([
        "# The agent, on every machine of the run, by Systems Manager.",
        run("aws", "ssm", "put-parameter", "--region", variable("REGION"), "--name", parameter, "--type", "String",
            "--overwrite", "--value", "file://cloudwatch_agent.json"),
        run("aws", "ssm", "send-command", "--region", variable("REGION"), "--document-name", "AWS-ConfigureAWSPackage",
            "--targets", targets, "--parameters", '{"action": ["Install"], "name": ["AmazonCloudWatchAgent"]}'),
        run("aws", "ssm", "send-command", "--region", variable("REGION"), "--document-name",
            "AmazonCloudWatch-ManageAgent", "--targets", targets, "--parameters", configure),
    ])


def pod_monitor() -> dict[str, Any]:
    """For Azure's managed Prometheus: read the GPU operator's exporter."""
    return {
        "apiVersion": note("azmonitoring.coreos.com/v1", "Azure's own, beside the one of the Prometheus operator."),
        "kind": "PodMonitor",
        "metadata": {"name": "dcgm-exporter", "namespace": "gpu-operator"},
        "spec": {"selector": {"matchLabels": {"app": "nvidia-dcgm-exporter"}},
                 "podMetricsEndpoints": [{"port": "metrics", "interval": "30s"}]},
    }


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


def _azure(job: Job) -> list[File]:
    site = site_of(job)
    group = ("--resource-group", variable("RESOURCE_GROUP"))
    action = output_of("az", "monitor", "action-group", "show", *group, "--name", f"embark-{job.name}", "--query", "id",
                       "--output", "tsv")
    settings = [setting("RESOURCE_GROUP", f"embark-{job.name}" if is_vm(job) else site.cluster),
                setting("LOCATION", site.region), needed("EMAIL", "where the mails go")]
    mail = run("az", "monitor", "action-group", "create", *group, "--name", f"embark-{job.name}", "--short-name",
               "embark", "--action", "email", "owner", variable("EMAIL"))
    if is_vm(job):
        scope = output_of("az", "group", "show", "--name", variable("RESOURCE_GROUP"), "--query", "id",
                          "--output", "tsv")
        alert = run("az", "monitor", "metrics", "alert", "create", *group, "--name", f"embark-{job.name}-idle",
                    "--description", "Machines are paid for and do not train.", "--scopes", scope,
                    "--target-resource-type", "Microsoft.Compute/virtualMachines", "--target-resource-region",
                    variable("LOCATION"), "--condition", f"avg Percentage CPU < {IDLE_PERCENT}",
                    "--window-size", f"{IDLE_MINUTES}m", "--evaluation-frequency", "5m", "--action", action)
        text = script("Azure Monitor: a mail when machines stand idle.", "\n".join(settings), PRELUDE, mail, alert)
        return [File("monitoring.sh", text, is_executable=True)]
    cluster = output_of("az", "aks", "show", *group, "--name", variable("CLUSTER"), "--query", "id", "--output", "tsv")
    workspace = output_of("az", "monitor", "account", "show", *group, "--name", variable("CLUSTER"), "--query", "id",
                          "--output", "tsv")
    steps = [
        unless(command("az", "monitor", "account", "show", *group, "--name", variable("CLUSTER")),
               run("az", "monitor", "account", "create", *group, "--name", variable("CLUSTER"), "--location",
                   variable("LOCATION"))),
        run("az", "aks", "update", *group, "--name", variable("CLUSTER"), "--enable-azure-monitor-metrics",
            "--azure-monitor-workspace-resource-id", workspace),
        run("kubectl", "apply", "-f", "dcgm_pod_monitor.yaml"),
        run("az", "deployment", "group", "create", *group, "--name", f"embark-rules-{job.name}", "--template-file",
            "alert_rules.json", "--parameters", Shell(f"workspace={workspace}"), Shell(f"cluster={cluster}"),
            Shell(f"actionGroup={action}"), Shell('location="$LOCATION"')),
    ]
    text = script(
        "Azure Monitor: the GPUs' metrics in managed Prometheus, and a mail when they stand idle or a machine is dead.",
        "\n".join([*settings, setting("CLUSTER", site.cluster)]), PRELUDE, 'cd "$(dirname "$0")"', mail, *steps,
        *apply_run_metrics(job))
    return [
        File("monitoring.sh", text, is_executable=True),
        File("dcgm_pod_monitor.yaml", yaml_text([pod_monitor()], about="What managed Prometheus reads of the GPUs.")),
        File("alert_rules.json", json.dumps(azure_rules(job), indent=2) + "\n"),
    ]


def ops_agent() -> dict[str, Any]:
    """Google's Ops Agent on a plain machine: GPUs, and the run's log."""
    return {
        "logging": {"receivers": {"embark": {"type": "files", "include_paths": [LOG]}},
                    "service": {"pipelines": {"embark": {"receivers": ["embark"]}}}},
        "metrics": {"receivers": {"gpus": {"type": "nvml"}},
                    "service": {"pipelines": {"gpus": {"receivers": ["gpus"]}}}},
    }


def gcp_policy(job: Job) -> dict[str, Any]:
    """An alert policy of Cloud Monitoring."""
    if is_vm(job):
        query = f"avg(agent_googleapis_com:gpu_utilization) < {IDLE_PERCENT}"
    else:
        query = f'avg(DCGM_FI_DEV_GPU_UTIL{{cluster="{site_of(job).cluster}"}}) < {IDLE_PERCENT}'
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


def _gcp(job: Job) -> list[File]:
    channel = output_of("gcloud", "beta", "monitoring", "channels", "list", option("--project", variable("PROJECT")),
                        f"--filter=displayName=embark-{job.name}", option("--format", "value(name)"), "--limit=1")
    there = output_of("gcloud", "alpha", "monitoring", "policies", "list", option("--project", variable("PROJECT")),
                      f"--filter=displayName=embark-{job.name}-idle-gpus", option("--format", "value(name)"))
    make_channel = run("gcloud", "beta", "monitoring", "channels", "create", option("--project", variable("PROJECT")),
                       f"--display-name=embark-{job.name}", "--type=email",
                       Shell('--channel-labels="email_address=$EMAIL"'), indent="  ")
    make_policy = run("gcloud", "alpha", "monitoring", "policies", "create", option("--project", variable("PROJECT")),
                      "--policy-from-file=idle_gpus.json", Shell('--notification-channels="$CHANNEL"'), indent="  ")
    parts = [
        f"""\
CHANNEL=''
if [ "$DRY_RUN" = 0 ]; then CHANNEL={channel}; fi
if [ -z "$CHANNEL" ]; then
{make_channel}
  if [ "$DRY_RUN" = 0 ]; then CHANNEL={channel}; fi
fi
if [ "$DRY_RUN" = 1 ] || [ -z {there} ]; then
{make_policy}
fi""",
    ]
    files: list[File] = []
    if is_vm(job):
        parts.append(_ops_agents(job))
        files.append(File("ops_agent.yaml", yaml_text([ops_agent()], about="What Google's Ops Agent sends: the GPUs' "
                                                      "metrics and the run's log.")))
    text = script(
        "Cloud Monitoring: a mail when GPUs stand idle. On GKE the metrics are those of --monitoring=SYSTEM,DCGM; "
        "plain machines get the Ops Agent.",
        "\n".join([project_setting(job), setting("ZONE", site_of(job).zone), needed("EMAIL", "where the mails go")]),
        PRELUDE, 'cd "$(dirname "$0")"', *parts, *apply_run_metrics(job))
    return [File("monitoring.sh", text, is_executable=True),
            File("idle_gpus.json", json.dumps(gcp_policy(job), indent=2) + "\n"), *files]


def _ops_agents(job: Job) -> str:
    where = (option("--zone", variable("ZONE")), option("--project", variable("PROJECT")))
    install = ("curl --silent --show-error --fail --remote-name https://dl.google.com/cloudagents/add-google-cloud-ops-agent-repo.sh"
               " && sudo bash add-google-cloud-ops-agent-repo.sh --also-install"
               " && sudo cp ops_agent.yaml /etc/google-cloud-ops-agent/config.yaml"
               " && sudo systemctl restart google-cloud-ops-agent")
    name = Shell(f'"{job.name}-$rank"')
    target = Shell(f'"{job.name}-$rank:"')
    return f"""\
for rank in $(seq 0 {job.num_nodes - 1}); do
  {run("gcloud", "compute", "scp", "ops_agent.yaml", target, *where)}
{run("gcloud", "compute", "ssh", name, *where, option("--command", install), indent="  ")}
done"""
