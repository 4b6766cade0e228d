"""How the cluster's Prometheus finds the run's own metrics: for a run that answers on `watch.prometheus_port`."""

import json
from typing import Any

from embark.events.alerts import Alert, alerts
from embark.events.grafana import dashboard_text
from embark.events.metrics import GROUPS, METRICS, RUN, Metric
from embark.render.file import File
from embark.render.job import POD_TARGETS, Job
from embark.render.location import location_of
from embark.render.yaml_text import note, yaml_text

PORT_NAME = "metrics"
OBJECTS = "run_metrics.yaml"
DASHBOARD = "grafana_dashboard.json"
CLOUDWATCH_DASHBOARD = "cloudwatch_dashboard.json"
EVERY = "15s"
FIRST = {"batch.kubernetes.io/job-completion-index": "0"}
"""Rank 0 alone answers, and it runs in the first pod."""
_FIRST_POD = {"job": FIRST, "jobset": FIRST, "trainjob": FIRST,
              "pytorchjob": {"training.kubeflow.org/replica-index": "0"}}
_APIS = {"aws": "monitoring.coreos.com/v1", "azure": "azmonitoring.coreos.com/v1",
         "gcp": "monitoring.googleapis.com/v1"}
MONITOR_RESOURCES = {"aws": "podmonitors.monitoring.coreos.com", "azure": "podmonitors.azmonitoring.coreos.com",
                     "gcp": "podmonitorings.monitoring.googleapis.com"}
_COLUMNS, _WIDTH, _HEIGHT = 24, 8, 6


def is_scraped(job: Job) -> bool:
    return bool(job.spec.watch.prometheus_port) and job.spec.place.target in POD_TARGETS


def render_run_metrics(job: Job) -> list[File]:
    """The objects and the dashboard; nothing where the run does not answer."""
    files: list[File] = []
    if is_scraped(job):
        about = {"aws": "For the Prometheus operator: read the run's metrics, and wake someone.",
                 "azure": "For Azure's managed Prometheus: read the run's metrics. The rules are in alert_rules.json.",
                 "gcp": "For Google's managed Prometheus: read the run's metrics, and wake someone."}[job.cloud]
        files += [File(OBJECTS, yaml_text(objects(job), about=about)), File(DASHBOARD, dashboard_text())]
    if sends_to_cloudwatch(job):
        files.append(File(CLOUDWATCH_DASHBOARD, json.dumps(cloudwatch_dashboard(job), indent=2) + "\n"))
    return files


def sends_to_cloudwatch(job: Job) -> bool:
    return job.cloud == "aws" and "cloudwatch" in job.spec.watch.sinks


def objects(job: Job) -> list[dict[str, Any]]:
    """What reads the run, and the rules where the cluster's Prometheus takes them as an object."""
    metadata = {"name": f"{job.name}-metrics", "namespace": job.namespace, "labels": dict(job.labels)}
    api = _APIS[job.cloud]
    first = _FIRST_POD.get(job.spec.place.target, {})
    labels = {"matchLabels": {**job.labels, **first}}
    selector = note(labels, "rank 0 answers for all, and runs in the first pod") if first else labels
    endpoints = [{"port": PORT_NAME, "interval": EVERY}]
    rules = {"groups": [{"name": "embark", "rules": [_rule(one) for one in alerts()]}]}
    if job.cloud == "gcp":
        return [{"apiVersion": api, "kind": "PodMonitoring", "metadata": metadata,
                 "spec": {"selector": selector, "endpoints": endpoints}},
                {"apiVersion": api, "kind": "Rules", "metadata": metadata, "spec": rules}]
    monitor = {"apiVersion": api, "kind": "PodMonitor", "metadata": metadata,
               "spec": {"selector": selector, "podMetricsEndpoints": endpoints}}
    if job.cloud == "azure":
        return [monitor]
    return [monitor, {"apiVersion": api, "kind": "PrometheusRule", "metadata": metadata, "spec": rules}]


def cloudwatch_dashboard(job: Job) -> dict[str, Any]:
    """A widget a metric, in the order of the list."""
    shown = [one for group in GROUPS if group != RUN for one in METRICS if one.group == group]
    return {"widgets": [_widget(job, one, place) for place, one in enumerate(shown)]}


def _widget(job: Job, one: Metric, place: int) -> dict[str, Any]:
    across = _COLUMNS // _WIDTH
    dimensions = ",".join(["run", *one.labels])
    namespace = job.spec.watch.cloudwatch_namespace
    search = (f"SEARCH('{{\"{namespace}\",{dimensions}}} MetricName=\"{one.name}\" run=\"{job.spec.name}\"', "
              "'Average', 60)")
    return {
        "type": "metric", "x": place % across * _WIDTH, "y": place // across * _HEIGHT, "width": _WIDTH,
        "height": _HEIGHT,
        "properties": {"title": f"{one.label}, {one.unit}".removesuffix(", "), "view": "timeSeries",
                       "region": location_of(job).region,
                       "metrics": [[{"expression": search, "id": f"m{place}"}]]},
    }


def _rule(one: Alert) -> dict[str, Any]:
    return {"alert": one.name, "expr": one.expression, "for": f"{one.minutes}m", "labels": {"severity": one.severity},
            "annotations": {"summary": one.what}}
