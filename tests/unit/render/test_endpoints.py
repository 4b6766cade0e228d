"""Managed endpoints: their files are what the clouds' APIs take, and the image starts the server that they look for."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from functools import cache

import botocore.session
import kubernetes_validate
import pytest
import yaml
from botocore.validate import ParamValidator
from recorded_commands import STUB, run_script

from cloudsim.grammar import load_grammar
from embark.catalog import load_catalog
from embark.errors import SpecError
from embark.lint.check import lint_texts
from embark.lint.rendered import refuse_faults
from embark.plan.serving import measured_cost, version_bytes, versions_bytes
from embark.render.job import make_job
from embark.render.render import render
from embark.render.serving import ENDPOINTS
from embark.render.targets.endpoints import PORT
from embark.spec import load_spec

ROLE = "arn:aws:iam::123456789012:role/serve"
SETS = {
    "sagemaker": ("store.root=s3://bucket/runs", f"place.identity={ROLE}",
                  "place.image=123456789012.dkr.ecr.us-east-2.amazonaws.com/embark:1"),
    "azureml": ("store.root=az://container/runs", "place.storage_account=account",
                "place.image=registry.azurecr.io/embark:1"),
    "vertex-endpoint": ("store.root=gs://bucket/runs", "place.account=my-project",
                        "place.identity=server@my-project.iam.gserviceaccount.com"),
    "cloud-run": ("store.root=gs://bucket/runs", "place.account=my-project"),
}
VERBS = {"sagemaker.sh": (["deploy"], ["rollback"], ["rollback", "old"], ["request", "r.json"], ["delete"]),
         "azureml.sh": (["deploy"], ["status"], ["rollback", "v1"], ["undeploy", "v1"], ["request", "r"], ["delete"]),
         "vertex_endpoint.sh": (["deploy"], ["status"], ["rollback", "1"], ["undeploy", "1"], ["request", "r"],
                                ["delete"])}


@cache
def files_of(target, *sets):
    files = render(make_job(load_spec("quickstart", [*SETS[target], f"place.target={target}", *sets]), load_catalog()))
    assert refuse_faults(files) == []
    return {file.path: file for file in files}


def document(target, path, *sets):
    return yaml.safe_load(files_of(target, *sets)[path].text)


def calls(target, folder):
    """What its script calls, over all its commands."""
    files = list(files_of(target).values())
    (name,) = set(files_of(target)) & set(VERBS)
    return [call for words in VERBS[name]
            for call in run_script(files, name, ["--yes", *words], folder, {"WORKSPACE": "w"}).commands]


def operation(service, name):
    return botocore.session.get_session().get_service_model(service).operation_model(name).input_shape


def test_sagemaker_takes_the_model_the_configuration_and_the_scaling():
    for path, service, name in (("sagemaker_model.json", "sagemaker", "CreateModel"),
                                ("sagemaker_endpoint_config.json", "sagemaker", "CreateEndpointConfig")):
        report = ParamValidator().validate(document("sagemaker", path), operation(service, name))
        assert not report.has_errors(), report.generate_report()
    variant = document("sagemaker", "sagemaker_endpoint_config.json")["ProductionVariants"][0]
    shape = operation("sagemaker", "CreateEndpointConfig").members["ProductionVariants"].member
    assert variant["InstanceType"] in shape.members["InstanceType"].enum
    assert variant["RoutingConfig"]["RoutingStrategy"] in shape.members["RoutingConfig"].members[
        "RoutingStrategy"].enum
    scaling = document("sagemaker", "sagemaker_scaling.json")
    shape = operation("application-autoscaling", "PutScalingPolicy").members["TargetTrackingScalingPolicyConfiguration"]
    assert not ParamValidator().validate(scaling, shape).has_errors()
    metric = shape.members["PredefinedMetricSpecification"].members["PredefinedMetricType"]
    assert scaling["PredefinedMetricSpecification"]["PredefinedMetricType"] in metric.enum


def test_aws_has_every_call_and_parameter_of_the_script(tmp_path):
    without_endpoint = STUB.replace("case $words in", 'case $words in\n  *" describe-endpoint "*) exit 1 ;;', 1)
    files = list(files_of("sagemaker").values())
    first = run_script(files, "sagemaker.sh", ["deploy", "--yes"], tmp_path, stub=without_endpoint)
    version = document("sagemaker", "sagemaker_model.json")["ModelName"]
    settled = STUB.replace("case $words in", f'case $words in\n  *" describe-endpoint "*) echo {version}; exit 0 ;;', 1)
    again = run_script(files, "sagemaker.sh", ["deploy", "--yes"], tmp_path, stub=settled)
    assert again.code == 0
    seen = set()
    for call in [*first.commands, *again.commands, *calls("sagemaker", tmp_path)]:
        service, command = call[1], call[2]
        if command == "wait":
            continue
        model = botocore.session.get_session().get_service_model(service)
        name = "".join(word.capitalize() for word in command.split("-"))
        known = {re.sub(r"(?<!^)(?=[A-Z])", "-", member).lower() for member in model.operation_model(
            name).input_shape.members}
        given = {word[2:] for word in call if word.startswith("--")} - {"region", "query", "output", "cli-input-json"}
        assert given <= known, (command, given - known)
        seen.add(command)
    assert seen >= {"create-model", "create-endpoint-config", "create-endpoint", "update-endpoint", "delete-endpoint",
                    "invoke-endpoint", "register-scalable-target", "put-scaling-policy"}


@pytest.mark.parametrize(("target", "program"), [("vertex-endpoint", "gcloud"), ("azureml", "az")])
def test_the_cloud_s_program_knows_every_command_and_flag(target, program, tmp_path):
    grammar = load_grammar(program)
    seen = {grammar.parse(call[1:]).name for call in calls(target, tmp_path) if call[0] == program}
    assert len(seen) >= 8


def test_cloud_run_s_container_is_valid_and_has_room_for_two_versions():
    sets = ("model.rows_per_table=2000000", "serve.tables=int8")
    service = document("cloud-run", "cloud_run.yaml", *sets)
    assert (service["apiVersion"], service["kind"]) == ("serving.knative.dev/v1", "Service")
    revision = service["spec"]["template"]["spec"]
    assert set(revision) <= {"containerConcurrency", "timeoutSeconds", "serviceAccountName", "containers"}
    (container,) = revision["containers"]
    kubernetes_validate.validate({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "p"},
                                  "spec": {"containers": [{"name": "c", **container}]}}, "1.36", strict=True)
    probe = container["startupProbe"]
    assert probe["periodSeconds"] * probe["failureThreshold"] <= 240  # Cloud Run refuses more
    assert container["ports"] == [{"name": "http1", "containerPort": PORT}]
    spec = load_spec("quickstart", list(sets))
    memory = int(container["resources"]["limits"]["memory"].removesuffix("Gi")) * 2**30
    assert memory >= versions_bytes(version_bytes(spec, "int8")) + measured_cost().process_bytes
    scale = service["spec"]["template"]["metadata"]["annotations"]
    assert (scale["autoscaling.knative.dev/minScale"], scale["autoscaling.knative.dev/maxScale"]) == ("2", "10")


@pytest.mark.schemas
def test_azure_ml_s_custom_reader_takes_the_endpoint_and_the_deployment(tmp_path):
    """By hand, with azure-ai-ml, whose packages do not go together with those of AWS's program."""
    from azure.ai.ml import load_online_deployment, load_online_endpoint

    for path, load in (("azureml_endpoint.yaml", load_online_endpoint),
                       ("azureml_deployment.yaml", load_online_deployment)):
        (tmp_path / path).write_text(files_of("azureml")[path].text)
        assert load(tmp_path / path).name


def test_azure_ml_s_deployment_asks_routes_that_the_server_has():
    deployment = document("azureml", "azureml_deployment.yaml")
    assert deployment["endpoint_name"] == document("azureml", "azureml_endpoint.yaml")["name"]
    routes = deployment["environment"]["inference_config"]
    assert {name: route["path"] for name, route in routes.items()} == {
        "liveness_route": "/v2/health/live", "readiness_route": "/v2/health/ready", "scoring_route": "/score"}
    assert {route["port"] for route in routes.values()} == {PORT}
    assert deployment["environment_variables"]["EMBARK_SERVE_PORT"] == str(PORT)
    assert deployment["request_settings"]["max_concurrent_requests_per_instance"] > 1
    large = document("azureml", "azureml_deployment.yaml", "serve.memory_gib=60")
    assert large["instance_type"] == "Standard_E16s_v3"  # the catalog's E16s_v5 is not offered there


def test_the_price_that_azure_ml_s_script_shows_is_of_its_deployment():
    deployed = document("azureml", "azureml_deployment.yaml", "serve.memory_gib=60")["instance_type"]
    (shown,) = re.findall(r"pay '2 to \d+ x (\S+) in ", files_of("azureml", "serve.memory_gib=60")["azureml.sh"].text)
    assert shown == deployed


@pytest.mark.parametrize(("target", "path", "old", "new", "code"), [
    ("cloud-run", "cloud_run.yaml", 'minScale: "2"', 'minScale: "0"', "EMB909"),
    ("cloud-run", "cloud_run.yaml", "cpu-throttling: 'false'", "cpu-throttling: 'true'", "EMB910"),
    ("cloud-run", "cloud_run.yaml", "memory: 4Gi", "memory: 512Mi", "EMB911"),
    ("azureml", "azureml_deployment.yaml", "max_concurrent_requests_per_instance: 8",
     "max_queue_wait_ms: 500", "EMB912"),
    ("azureml", "azureml_deployment.yaml", "port: 8080", "port: 5001", "EMB913"),
    ("cloud-run", "cloud_run.yaml", "containerPort: 8080", "containerPort: 80", "EMB913"),
])
def test_what_is_rendered_would_be_found_if_it_were_wrong(target, path, old, new, code):
    text = files_of(target)[path].text
    assert old in text
    assert code in {one.code for one in lint_texts({path: text.replace(old, new)})}


def test_what_is_deployed_changes_its_name_with_its_content():
    names = {document("sagemaker", "sagemaker_model.json", *sets)["ModelName"]
             for sets in ((), ("serve.tables=int8",), ("place.image=ghcr.io/me/embark:2",))}
    assert len(names) == 3
    model, config = (document("sagemaker", f"sagemaker_{name}.json") for name in ("model", "endpoint_config"))
    assert config["ProductionVariants"][0]["ModelName"] == model["ModelName"]


@pytest.mark.parametrize("target", ENDPOINTS)
def test_the_image_serves_by_its_environment_and_has_an_custom_model(target, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_model.py").write_text("import torch\n\n\nclass MyModel(torch.nn.Module):\n    pass\n")
    files = files_of.__wrapped__(target, "model.kind=my_model:MyModel")
    texts = "\n".join(file.text for path, file in files.items() if path.endswith((".json", ".yaml", ".sh")))
    assert "my_model.py" in texts
    assert 'CMD ["serve"]' in files["Dockerfile"].text
    assert 'COPY ["my_model.py", "./my_model.py"]' in files["Dockerfile"].text
    assert "!my_model.py" in files[".dockerignore"].text


@pytest.mark.parametrize("target", sorted(set(ENDPOINTS) - {"cloud-run"}))
@pytest.mark.needs("shellcheck")
def test_shellcheck_finds_nothing(target, tmp_path):
    import subprocess

    (name,) = set(files_of(target)) & set(VERBS)
    (tmp_path / name).write_text(files_of(target)[name].text)
    program = shutil.which("shellcheck")
    assert program is not None
    done = subprocess.run([program, str(tmp_path / name)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(("target", "sets", "says"), [
    ("sagemaker", ("place.identity=",), r"place\.identity"),
    ("vertex-endpoint", ("place.account=",), r"place\.account"),
    ("sagemaker", ("place.cloud=gcp",), "belongs to aws, and the spec is for gcp"),
    ("cloud-run", ("model.rows_per_table=9000000",), "has at most 32"),
    ("azureml", ("serve.memory_gib=900",), "no machine of azure has 900 GiB"),
], ids=str)
def test_what_an_endpoint_cannot_do_is_refused(target, sets, says):
    with pytest.raises(SpecError, match=says):
        make_job(load_spec("quickstart", [*SETS[target], f"place.target={target}", *sets]), load_catalog())


def test_the_server_is_named_by_the_environment_alone():
    """As SageMaker starts it: with the one argument `serve`."""
    env = document("sagemaker", "sagemaker_model.json")["PrimaryContainer"]["Environment"]
    assert env["EMBARK_SERVE_ARTIFACT"] == "s3://bucket/runs/quickstart/export"
    assert (env["EMBARK_SERVE_HOST"], env["EMBARK_SERVE_PORT"]) == ("0.0.0.0", "8080")


def test_a_server_has_a_process_for_each_vcpu_of_its_machine():
    for target, path, machine, num in (("azureml", "azureml_deployment.yaml", "Standard_E16s_v5", "16"),
                                       ("sagemaker", "sagemaker_model.json", "c7i.2xlarge", "8")):
        found = document(target, path, f"serve.machine={machine}")
        env = found["environment_variables"] if target == "azureml" else found["PrimaryContainer"]["Environment"]
        assert env["EMBARK_SERVE_WORKERS"] == num
    container = document("cloud-run", "cloud_run.yaml")["spec"]["template"]["spec"]["containers"][0]
    assert {"name": "EMBARK_SERVE_WORKERS", "value": container["resources"]["limits"]["cpu"]} in container["env"]


GCLOUD = """#!PYTHON
import json, sys
from pathlib import Path
file, words = Path(sys.argv[0]).with_suffix(".json"), sys.argv[1:]
state = json.loads(file.read_text()) if file.exists() else {"endpoint": False, "models": [], "deployed": []}
flags = dict(word[2:].partition("=")[::2] for word in words if word.startswith("--"))
match words[:3]:
    case ["ai", "endpoints", "list"]:
        print("77" if state["endpoint"] else "")
    case ["ai", "endpoints", "create"]:
        state["endpoint"] = True
    case ["ai", "endpoints", "describe"]:
        rows = [[name, str(number)] for number, name in state["deployed"]]
        print("\\n".join(",".join(row) if flags["format"].startswith("csv") else row[1] for row in rows))
    case ["ai", "endpoints", "deploy-model"]:
        state["deployed"].append([len(state["deployed"]) + 1, flags["display-name"]])
    case ["ai", "endpoints", "undeploy-model"]:
        state["deployed"] = [one for one in state["deployed"] if str(one[0]) != flags["deployed-model-id"]]
    case ["ai", "endpoints", "delete"]:
        assert not state["deployed"]
        state["endpoint"] = False
    case ["ai", "models", "upload"]:
        state["models"].append(flags["model-id"])
    case ["ai", "models", "describe" | "delete"]:
        if words[3] not in state["models"]:
            sys.exit(1)
        if words[2] == "delete":
            state["models"].remove(words[3])
file.write_text(json.dumps(state))
"""


@pytest.fixture
def vertex(tmp_path):
    """A project that remembers its endpoint, and what runs the rendered script in it."""
    programs = tmp_path / "programs"
    programs.mkdir()
    (programs / "gcloud").write_text(GCLOUD.replace("PYTHON", sys.executable))
    script = tmp_path / "vertex_endpoint.sh"
    script.write_text(files_of("vertex-endpoint")["vertex_endpoint.sh"].text)
    for path in (programs / "gcloud", script):
        path.chmod(0o755)

    def run(*words, answer=""):
        done = subprocess.run(["bash", str(script), *words], input=answer, text=True, capture_output=True, check=False,
                              env={"PATH": f"{programs}:{os.environ['PATH']}"})
        state = programs / "gcloud.json"
        return done, json.loads(state.read_text()) if state.exists() else None

    return run


def test_deploying_a_version_twice_adds_no_machines_and_delete_leaves_none(vertex):
    for _ in range(2):
        done, state = vertex("deploy", "--yes")
        assert done.returncode == 0, done.stderr
        assert len(state["deployed"]) == 1
    assert "--traffic-split=1=100" in done.stderr
    for _ in range(2):
        done, state = vertex("delete")
        assert done.returncode == 0, done.stderr
        assert state == {"endpoint": False, "models": [], "deployed": []}


@pytest.mark.parametrize("target", ["vertex-endpoint", "sagemaker", "azureml"])
def test_deploy_shows_the_price_and_asks_before_it_starts_machines(target, tmp_path):
    files = list(files_of(target).values())
    (name,) = set(files_of(target)) & set(VERBS)
    refused = run_script(files, name, ["deploy"], tmp_path, {"WORKSPACE": "w", "YES": "0"})
    assert refused.commands == []
    assert re.search(r"2 to 10 x \S+ in \S+, 0\.\d\d USD an hour each", refused.output)
    assert run_script(files, name, ["deploy", "--yes"], tmp_path, {"WORKSPACE": "w"}).commands


def test_vertex_asks_too_and_starts_nothing_without_an_answer(vertex):
    done, state = vertex("deploy")
    assert (done.returncode, state) == (130, None)
    done, state = vertex("deploy", answer="y\n")
    assert (done.returncode, len(state["deployed"])) == (0, 1)
