"""A run that answers Prometheus is found by the cluster's own; one that does not is left alone."""

from __future__ import annotations

import json
import subprocess
from dataclasses import replace

import botocore.session
import pytest
import yaml
from botocore.validate import ParamValidator
from limits import HANG_S
from recorded_commands import run_script
from render_jobs import job_of

from embark.events.metrics import METRICS, TRAINING_GROUPS
from embark.events.monitoring import alerts
from embark.lint.check import lint_texts
from embark.render.clouds.aws import bucket_statements
from embark.render.image import render_image
from embark.render.render import render_infrastructure
from embark.render.targets.kubernetes import render_job
from embark.spec.run import WatchSpec

MACHINES = {"aws": "p4d.24xlarge", "azure": "Standard_ND96asr_v4", "gcp": "a2-highgpu-8g"}
KINDS = {"aws": ["PodMonitor", "PrometheusRule"], "azure": ["PodMonitor"], "gcp": ["PodMonitoring", "Rules"]}
SETTINGS = {"PROJECT": "my-project", "EMAIL": "me@example.com"}


def watched(cloud: str, watch: WatchSpec, **place: object):
    job = job_of(MACHINES[cloud], **place)
    return replace(job, spec=job.spec.model_copy(update={"watch": watch}))


ANSWERS = WatchSpec(prometheus_port=9464)


@pytest.mark.parametrize("cloud", MACHINES)
def test_by_default_there_is_nothing_to_find(cloud):
    files = {file.path for file in render_infrastructure(job_of(MACHINES[cloud]))}
    assert not files & {"run_metrics.yaml", "grafana_dashboard.json", "cloudwatch_dashboard.json"}


@pytest.mark.parametrize("cloud", MACHINES)
def test_the_first_pod_is_read_by_the_name_of_its_port(cloud):
    job = watched(cloud, ANSWERS)
    files = {file.path: file.text for file in render_infrastructure(job)}
    found = list(yaml.safe_load_all(files["run_metrics.yaml"]))
    assert [one["kind"] for one in found] == KINDS[cloud]
    spec = found[0]["spec"]
    [endpoint] = spec.get("podMetricsEndpoints") or spec["endpoints"]
    training = next(one for one in yaml.safe_load_all(render_job(job)[0].text) if one["kind"] == "Job")
    template = training["spec"]["template"]
    ports = {port["name"]: port["containerPort"] for port in template["spec"]["containers"][0]["ports"]}
    assert ports[endpoint["port"]] == 9464
    wanted = spec["selector"]["matchLabels"]
    assert wanted.pop("batch.kubernetes.io/job-completion-index") == "0"
    assert wanted.items() <= template["metadata"]["labels"].items()
    assert found[0]["metadata"]["namespace"] == training["metadata"]["namespace"]
    assert json.loads(files["grafana_dashboard.json"])["title"] == "Embark"


@pytest.mark.needs("prometheus")
@pytest.mark.parametrize("cloud", ["aws", "gcp"])
def test_promtool_takes_the_rules_that_are_handed_to_the_cluster(cloud, tmp_path):
    files = {file.path: file.text for file in render_infrastructure(watched(cloud, ANSWERS))}
    rules = list(yaml.safe_load_all(files["run_metrics.yaml"]))[1]["spec"]
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump(rules))
    done = subprocess.run(["promtool", "check", "rules", tmp_path / "rules.yaml"], capture_output=True, text=True,
                          timeout=HANG_S, check=False)
    assert done.returncode == 0, done.stderr
    assert f"{len(alerts())} rules found" in done.stdout


def test_azure_has_the_rules_in_its_own_file():
    def rules(watch):
        files = {file.path: file.text for file in render_infrastructure(watched("azure", watch))}
        return json.loads(files["alert_rules.json"])["resources"][0]["properties"]["rules"]

    assert {one.name for one in alerts()} == {rule["alert"] for rule in rules(ANSWERS)} - {
        rule["alert"] for rule in rules(WatchSpec())}
    assert all(rule["for"].startswith("PT") and rule["for"] != "PT0M" for rule in rules(ANSWERS))


@pytest.mark.parametrize("cloud", MACHINES)
def test_the_script_hands_it_over_and_the_linter_finds_nothing(cloud, tmp_path):
    sinks = ("cloudwatch",) if cloud == "aws" else ("otlp",)
    files = render_infrastructure(watched(cloud, WatchSpec(prometheus_port=9464, sinks=sinks)))
    assert not lint_texts({file.path: file.text for file in files})
    ran = run_script(files, "monitoring.sh", [], tmp_path, {**SETTINGS, "DRY_RUN": "1"})
    assert ran.code == 0
    assert "kubectl apply -f run_metrics.yaml" in ran.output
    ran = run_script(files, "monitoring.sh", [], tmp_path, SETTINGS)
    assert (ran.code, "has no Prometheus" in ran.output) == (0, True)  # the programs here answer "get" with 1


def test_cloudwatch_gets_a_dashboard_of_the_metrics_that_are_sent_to_it(tmp_path):
    files = render_infrastructure(watched("aws", WatchSpec(sinks=("cloudwatch",), cloudwatch_namespace="Ads/Embark")))
    body = json.loads({file.path: file.text for file in files}["cloudwatch_dashboard.json"])
    searches = [widget["properties"]["metrics"][0][0]["expression"] for widget in body["widgets"]]
    assert "SEARCH('{\"Ads/Embark\",run,host,gpu} MetricName=\"gpu_power_w\" run=\"dlrm\"', 'Average', 60)" in searches
    assert len(searches) == len([one for one in METRICS if one.group in TRAINING_GROUPS])
    ran = run_script(files, "monitoring.sh", [], tmp_path, SETTINGS)
    [words] = [words for words in ran.of("aws") if words[2] == "put-dashboard"]
    given = dict(zip(words[3::2], words[4::2], strict=True))
    model = botocore.session.get_session().get_service_model("cloudwatch").operation_model("PutDashboard")
    called = {"DashboardName": given["--dashboard-name"], "DashboardBody": given["--dashboard-body"]}
    assert not ParamValidator().validate(called, model.input_shape).has_errors()
    assert given["--dashboard-body"] == "file://cloudwatch_dashboard.json"


def test_the_run_s_role_may_send_what_it_sends_and_no_more():
    statements = bucket_statements(watched("aws", WatchSpec(sinks=("cloudwatch",))))
    [sends] = [one for one in statements if one["Action"] == ["cloudwatch:PutMetricData"]]
    assert sends["Condition"] == {"StringEquals": {"cloudwatch:namespace": "Embark"}}
    assert not [one for one in bucket_statements(watched("aws", ANSWERS)) if "cloudwatch" in str(one)]


def test_the_image_has_what_the_run_needs():
    text = render_image(watched("aws", WatchSpec(prometheus_port=9464, sinks=("otlp",))))[0].text
    assert ".whl[cloud,columns,tensorboard,otlp,prometheus]" in text
    assert ".whl[cloud,columns,tensorboard]" in render_image(watched("aws", WatchSpec()))[0].text


HELM_MAKES_THE_CRD = """#!/bin/bash
{ flock 9; printf '%s\\0' "${0##*/}" "$@" '' >&9; } 9>>"$RECORD"
case "${0##*/} $*" in
  helm*kube-prometheus-stack*) touch "$HOME/has-prometheus" ;;
  kubectl*"get crd"*) test -e "$HOME/has-prometheus" ;;
esac
"""


def test_eks_gets_a_prometheus_that_reads_the_run_s_objects(tmp_path):
    files = render_infrastructure(watched("aws", ANSWERS))
    env = {**SETTINGS, "HOME": str(tmp_path)}
    ran = run_script(files, "monitoring.sh", [], tmp_path, env, stub=HELM_MAKES_THE_CRD)
    assert ran.code == 0, ran.output
    (install,) = (words for words in ran.of("helm") if "upgrade" in words)
    assert ["kubectl", "apply", "-f", "run_metrics.yaml"] in ran.commands
    objects = yaml.safe_load_all(next(file.text for file in files if file.path == "run_metrics.yaml"))
    assert [one["metadata"]["labels"]["release"] for one in objects] == [install[2]] * 2
    again = run_script(files, "monitoring.sh", [], tmp_path, env, stub=HELM_MAKES_THE_CRD)
    assert not again.of("helm"), "a Prometheus that is there is left alone"


def test_without_metrics_eks_gets_no_prometheus(tmp_path):
    ran = run_script(render_infrastructure(job_of("p4d.24xlarge")), "monitoring.sh", [], tmp_path, SETTINGS)
    assert ran.code == 0
    assert not ran.of("helm")


@pytest.mark.parametrize("target", ["job", "vm"])
def test_google_cloud_is_given_an_alarm_for_dead_machines(target, tmp_path):
    files = render_infrastructure(job_of("a2-highgpu-8g", target=target))
    ran = run_script(files, "monitoring.sh", [], tmp_path, SETTINGS)
    assert ran.code == 0, ran.output
    given = {word.partition("=")[2] for words in ran.of("gcloud") for word in words if "--policy-from-file" in word}
    assert given == {"idle_gpus.json", "dead_machines.json"}
    policy = json.loads(next(file.text for file in files if file.path == "dead_machines.json"))
    (condition,) = policy["conditions"]
    query = condition["conditionPrometheusQueryLanguage"]["query"]
    assert policy["displayName"] == "embark-dlrm-dead-machines"
    assert ("instance_uptime" if target == "vm" else 'condition="Ready",status!="True"') in query
