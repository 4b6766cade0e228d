"""The Job that exports a run in the cluster, near its bucket and with its data."""

from __future__ import annotations

from pathlib import Path

import kubernetes_validate
import pytest
import yaml

from embark.catalog import load_catalog
from embark.errors import ExitCode
from embark.render.job import make_job
from embark.render.render import own_files, render
from embark.render.targets.kubernetes import EXPORT_FILE, MANIFESTS, render_export_job
from embark.spec import load_spec

EXAMPLES = Path(__file__).parents[3] / "examples" / "cloud_deployment"


def job_of(cloud: str, *sets: str):
    return make_job(load_spec(str(EXAMPLES / cloud / "run.toml"), list(sets)), load_catalog())


def objects(cloud: str, *sets: str) -> tuple[dict, dict]:
    """The Job that exports, and the one that trains."""
    texts = {file.path: file.text for file in render(job_of(cloud, *sets))}
    trained = next(one for one in yaml.safe_load_all(texts[MANIFESTS["job"][0]]) if one["kind"] == "Job")
    return yaml.safe_load(texts[EXPORT_FILE]), trained


@pytest.mark.parametrize("cloud", ["aws", "azure", "gcp"])
def test_the_export_of_a_guide_runs_as_its_training_does(cloud):
    found, trained = objects(cloud)
    kubernetes_validate.validate(found, "1.36", strict=True)
    pod, training = found["spec"]["template"]["spec"], trained["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    spec = load_spec(str(EXAMPLES / cloud / "run.toml"))
    run = f"{spec.store.root}/dlrm"
    assert container["command"] == ["embark", "export", run, "--to", f"{run}/export", "--tables", "int8"]
    assert container["image"] == training["containers"][0]["image"]
    assert pod["serviceAccountName"] == training["serviceAccountName"]
    claims = [one["persistentVolumeClaim"] for one in training["volumes"] if "persistentVolumeClaim" in one]
    assert [one["persistentVolumeClaim"] for one in pod["volumes"]] == claims
    assert "nvidia.com/gpu" not in container["resources"]["limits"]
    assert container["resources"]["limits"]["memory"] == "6Gi"  # 204 million ids, and pieces of the tables
    # It is neither found as a pod of the run nor spread as one.
    assert not trained["spec"]["template"]["metadata"]["labels"].items() <= \
        found["spec"]["template"]["metadata"]["labels"].items()


def test_an_export_is_tried_again_after_a_fault_and_not_after_bad_input():
    found, _ = objects("aws")
    rules = [rule for rule in found["spec"]["podFailurePolicy"]["rules"] if "onExitCodes" in rule]
    actions = {code: rule["action"] for rule in rules for code in rule["onExitCodes"]["values"]}
    assert actions[int(ExitCode.BAD_INPUT)] == "FailJob"
    assert int(ExitCode.FAULT) not in actions  # counted by backoffLimit
    assert {rule["onExitCodes"]["containerName"] for rule in rules} == {"export"}
    assert found["spec"]["ttlSecondsAfterFinished"] > 0


def test_a_run_that_pods_do_not_share_has_no_job_for_its_export():
    assert not render_export_job(job_of("aws", "store.root=/mnt/data/runs"))
    assert EXPORT_FILE not in [file.path for file in own_files(job_of("aws"))]  # `embark rehearse` trains these
