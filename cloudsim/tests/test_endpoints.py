"""Managed endpoints refuse what the clouds' own refuse, and the headline names the cause."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
from account_shell import ScriptResult, run_shell

from cloudsim.account import Account
from cloudsim.azure.program import Az
from cloudsim.gcp import project_of
from cloudsim.server import open_account
from embark.catalog import load_catalog
from embark.lint.rendered import render_folder
from embark.rehearse import processes
from embark.rehearse.account_scripts import ENVIRONMENT, make_steps
from embark.render.job import make_job
from embark.render.serving import ENDPOINTS
from embark.spec import load_spec

SETS = {
    "sagemaker": ("store.root=s3://own-7/runs", "place.region=us-east-2",
                  "place.identity=arn:aws:iam::123456789012:role/serve",
                  "place.image=123456789012.dkr.ecr.us-east-2.amazonaws.com/embark:1"),
    "cloud-run": ("store.root=gs://own-7/runs", "place.region=us-central1", "place.account=your-project",
                  "place.image=us-central1-docker.pkg.dev/your-project/embark/embark:1"),
    "vertex-endpoint": ("store.root=gs://own-7/runs", "place.region=us-central1", "place.account=your-project",
                        "place.identity=server@your-project.iam.gserviceaccount.com",
                        "place.image=us-central1-docker.pkg.dev/your-project/embark/embark:1"),
    "azureml": ("store.root=az://own-7/runs", "place.region=eastus", "place.storage_account=own7",
                "place.image=embarkregistry.azurecr.io/embark:1"),
}
STEPS = "the steps"  # In place of a file: a fault in what the user runs before.
SMALL = ("embark train", "embark export")  # What makes the small model.


def deploy(target: str, root: Path, fault: tuple[str, str, str] = ("", "", ""), *, account: Account | None = None,
           python: str = "", more: str = "", **env: str) -> ScriptResult:
    """Go from an empty account to `deploy`, with a fault in a file or in the steps; `more` follows. With a `python` to
    run `embark` there is a model."""
    sets = [*SETS[target], f"place.target={target}"]
    render_folder("quickstart", sets, out=root / "folder")
    job = make_job(load_spec("quickstart", sets), load_catalog())
    file, old, new = fault
    if file and file != STEPS:
        path = root / "folder" / file
        path.write_text(once(old, new, path.read_text()))
    lines = []
    for step in make_steps(job):
        for line in step.commands.splitlines():
            if line.startswith("embark image"):
                lines += [f"docker build --tag {job.image} .", f"docker push {job.image}"]
            elif python or not any(one in line for one in SMALL):
                lines.append(line)
        if step.title == "deploy":
            break
    text = "\n".join(["set -eo pipefail", *lines, more])
    (root / "state" / "programs").mkdir(parents=True, exist_ok=True)
    if python:
        program = root / "state" / "programs" / "embark"
        program.write_text(f'#!/bin/sh\nexec "{python}" -m embark "$@"\n')
        program.chmod(0o755)
    opened = account or open_account(job.cloud, root / "state")
    try:
        return run_shell(opened, once(old, new, text) if file == STEPS else text, root / "folder",
                         {**ENVIRONMENT, **env})
    finally:
        opened.close()


def once(old: str, new: str, text: str) -> str:
    changed, count = re.subn(old, new.replace("\\", r"\\"), text)
    assert count, f"{old} is not in {text}"
    return changed


FAULTS = {
    "sagemaker": {
        "an image of another cloud": ("sagemaker_model.json", r"\d+\.dkr\.ecr[^/]+", "embark.azurecr.io",
                                      'Using non-ECR image "embark.azurecr.io/embark:1"'),
        "a tag that was not pushed": ("sagemaker_model.json", "embark:1", "embark:2", "embark:2 not found"),
        "a role that SageMaker may not assume": (STEPS, r"sagemaker\.amazonaws\.com", "ec2.amazonaws.com",
                                                 "Could not assume role arn:aws:iam::123456789012:role/serve"),
        "a role that may not read the artifact": (STEPS, "s3:GetObject", "s3:PutObject",
                                                  "AccessDenied: User: .* to perform: s3:GetObject"),
        "a role that may not pull": (STEPS, "AmazonEC2ContainerRegistryReadOnly", "AmazonS3ReadOnlyAccess",
                                     "does not have BatchGetImage permission for the image"),
        "a machine that does not exist": ("sagemaker_endpoint_config.json", "ml.c7i.xlarge", "ml.c7i.xlarg",
                                          "'ml.c7i.xlarg' at 'InstanceType' failed to satisfy constraint"),
        "a disk beside the machine's own": ("sagemaker_endpoint_config.json", "ml.c7i.xlarge", "ml.g5.xlarge",
                                            "VolumeSizeInGB parameter is not allowed .* ml.g5.xlarge"),
        "a model name with a line": ("sagemaker_model.json", '"ModelName": "quickstart-', '"ModelName": "quickstart_',
                                     "'quickstart_serve-.*' at 'ModelName' failed .* pattern"),
        "another port": ("sagemaker_model.json", '"8080"', '"8000"', "requests come to port 8080"),
        "a bucket that does not exist": ("sagemaker_model.json", "s3://own-7", "s3://own-8",
                                         "NoSuchBucket: The specified bucket does not exist: own-8"),
    },
    "cloud-run": {
        "an image of another cloud": ("cloud_run.yaml", "us-central1-docker.pkg.dev/your-project/embark",
                                      "embark.azurecr.io", "Expected an image path .* embark.azurecr.io/embark:1"),
        "a tag that was not pushed": ("cloud_run.yaml", "embark:1\n", "embark:2\n", "Image '.*embark:2' not found"),
        "a service that is not enabled": (STEPS, "gcloud services enable run.googleapis.com", "true",
                                          "run.googleapis.com has not been used in project"),
        "an account that may not read": (STEPS, "roles/storage.objectViewer", "roles/logging.logWriter",
                                         "403 from Cloud Storage: .* storage.objects.get access to gs://own-7"),
        "an account that does not exist": ("cloud_run.yaml", "      containers:",
                                           "      serviceAccountName: no@your-project.iam.gserviceaccount.com\n"
                                           "      containers:", "iam.serviceaccounts.actAs' denied .* no@your-"),
        "another port": ("cloud_run.yaml", "containerPort: 8080", "containerPort: 9090", "requests come to port 9090"),
        "too long a name": ("cloud_run.yaml", "name: quickstart-serve", f"name: {'q' * 50}",
                            "metadata.name.* too long"),
        "too few processors": ("cloud_run.yaml", "memory: 4Gi", "memory: 16Gi", "cpu must be at least 4"),
        "too long a start": ("cloud_run.yaml", "failureThreshold: 12", "failureThreshold: 30", "must not exceed 240 s"),
        "an unknown field": ("cloud_run.yaml", "timeoutSeconds: 30", "timeoutSecond: 30",
                             'unknown field "timeoutSecond"'),
    },
    "vertex-endpoint": {
        "an image of another cloud": ("vertex_endpoint.sh", "us-central1-docker.pkg.dev/your-project/embark",
                                      "embark.azurecr.io", "Expected an image path .* embark.azurecr.io/embark:1"),
        "a tag that was not pushed": ("vertex_endpoint.sh", "embark:1 ", "embark:2 ", "Image '.*embark:2' not found"),
        "an account that may not read": (STEPS, "roles/storage.objectViewer", "roles/logging.logWriter",
                                         "403 from Cloud Storage: server@your-project"),
        "a machine that does not exist": ("vertex_endpoint.sh", "n2-highcpu-4 --min", "n2-tiny-4 --min",
                                          'Machine type "n2-tiny-4" is not supported'),
        "half of the traffic": ("vertex_endpoint.sh", "0=100", "0=50", "must sum to 100, and sum to 50"),
        "a model id that begins with a digit": ("vertex_endpoint.sh", "VERSION=quickstart", "VERSION=7quickstart",
                                                "--model-id: '7quickstart.*' does not match"),
        "another port": ("vertex_endpoint.sh", "--container-ports=8080", "--container-ports=9090",
                         "requests come to port 9090"),
    },
    "azureml": {
        "an image of another cloud": ("azureml_deployment.yaml", "embarkregistry.azurecr.io", "docker.io/own",
                                      "docker.io/own/embark:1 is in no registry of Azure"),
        "a tag that was not pushed": ("azureml_deployment.yaml", "embark:1", "embark:2", "embark:2: not found"),
        "an identity that may not read": ("azureml.sh", "Storage Blob Data Reader", "Reader",
                                          "403 Forbidden: AuthorizationPermissionMismatch: .* read own7/own-7"),
        "an identity that may not pull": ("azureml.sh", "allow AcrPull", "allow Reader", "cannot be pulled .* 401"),
        "a machine that endpoints lack": ("azureml_deployment.yaml", "Standard_F4s_v2", "Standard_D4s_v5",
                                          "Standard_D4s_v5 is not supported by managed online endpoints"),
        "another port": ("azureml_deployment.yaml", "port: 8080", "port: 9090", "requests come to port 9090"),
        "no workspace": (STEPS, "az ml workspace create.*", "true", "workspaces/models' .*was not found"),
        "too long a name": ("azureml_endpoint.yaml", "name: quickstart-serve", f"name: {'q' * 33}",
                            "name: '.*' does not match"),
        "an unknown field": ("azureml_deployment.yaml", "instance_count:", "instances:", 'unknown field "instances"'),
    },
}


@pytest.mark.slow
@pytest.mark.parametrize(("target", "fault"), [(one, fault) for one, faults in FAULTS.items() for fault in faults])
def test_a_fault_is_refused_and_named(target: str, fault: str, tmp_path: Path):
    file, old, new, headline = FAULTS[target][fault]
    done = deploy(target, tmp_path, (file, old, new))
    assert done.code != 0, done.output[-2000:]
    assert re.search(headline, done.headline), f"{done.headline}\n{done.output[-2000:]}"


@pytest.mark.slow
@pytest.mark.parametrize("target", ["sagemaker", "vertex-endpoint", "azureml"])
def test_machines_beyond_the_quota_are_refused(target: str, tmp_path: Path):
    (tmp_path / "state").mkdir()
    account = open_account(ENDPOINTS[target], tmp_path / "state")
    if target == "sagemaker":
        account.quotas["ml.c7i.xlarge for endpoint usage"] = 1
    elif target == "azureml":
        az = account.programs["az"]
        assert isinstance(az, Az)
        az.subscription.quotas["standardFSv2Family"] = 8
    else:
        project_of(account).quotas["aiplatform.googleapis.com/custom_model_serving_cpus"] = 4
    headline = deploy(target, tmp_path, account=account).headline
    assert re.search(r"ResourceLimitExceeded|RESOURCE_EXHAUSTED|OutOfQuota", headline), headline


@pytest.mark.slow
@pytest.mark.parametrize(("target", "words"), [
    ("sagemaker", r"the versions of s3://own-7/runs/quickstart/export need \d\d+ GiB, and there are 30"),
    ("cloud-run", r"the versions of gs://own-7/runs/quickstart/export need \d\d+ GiB, and there are 4")])
def test_a_volume_without_room_for_the_versions_is_refused(target: str, words: str, tmp_path: Path):
    done = deploy(target, tmp_path, EMBARK_ARTIFACT_BYTES=str(40 * 2**30))
    assert done.code != 0
    assert re.search(words, done.headline), done.headline


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch, warm_python: str) -> str:
    """Fork `embark` and its servers from a process that has imported torch."""
    monkeypatch.setattr(processes, "sys", SimpleNamespace(executable=warm_python))
    return warm_python


HEALTH = {
    "cloud-run": ("cloud_run.yaml", "path: /v2/health/ready", "path: /health", "GET /health .* status 404"),
    "vertex-endpoint": ("vertex_endpoint.sh", "--container-health-route=/v2/health/ready",
                        "--container-health-route=health", "--container-health-route: 'health' does not match"),
    "azureml": ("azureml_deployment.yaml", "path: /v2/health/live", "path: /alive", "GET /alive .* status 404"),
}


@pytest.mark.slow
@pytest.mark.parametrize("target", HEALTH)
def test_a_wrong_health_route_is_named(target: str, tmp_path: Path, forked: str):
    file, old, new, headline = HEALTH[target]
    done = deploy(target, tmp_path, (file, old, new), python=forked)
    assert done.code != 0
    assert re.search(headline, done.headline), done.output[-3000:]


@pytest.mark.slow
def test_a_service_inside_a_network_is_not_reached_from_outside(tmp_path: Path, forked: str):
    done = deploy("cloud-run", tmp_path, python=forked, more="""
gcloud components install cloud-run-proxy
gcloud run services proxy quickstart-serve --region=us-central1""")
    assert done.code != 0
    assert "run.googleapis.com/ingress lets in its VPC network alone" in done.headline


@pytest.mark.slow
def test_a_failed_update_keeps_the_old_machines_and_says_why(tmp_path: Path, forked: str):
    done = deploy("sagemaker", tmp_path, python=forked, more="""
sed -i 's#"8080"#"8000"#; s#"ModelName": "[^"]*#&x#' sagemaker_model.json
sed -i -E 's#"(Model|EndpointConfig)Name": "[^"]*#&x#' sagemaker_endpoint_config.json
sed -i 's#^VERSION=.*#&x#' sagemaker.sh
./sagemaker.sh deploy --yes || code=$?
aws sagemaker describe-endpoint --region us-east-2 --endpoint-name quickstart-serve \
  --query '[EndpointStatus, EndpointConfigName]' --output text
exit $code""")
    assert done.code == 70, done.output[-3000:]
    *_, reason, state = done.output.strip().splitlines()
    assert "The primary container for production variant all did not pass the ping health check" in reason
    assert re.fullmatch(r"InService\tquickstart-serve-[0-9a-f]{8}", state)
