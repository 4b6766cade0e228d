"""Every broken manifest of the older guides fails by what really happens, with a sentence that says why and a fix."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from integration.cloud.rehearsals import rehearse
from render_jobs import job_of

from embark.render.targets.kubernetes import render_job

pytestmark = pytest.mark.slow

GUIDES = Path(__file__).parents[2] / "fixtures" / "lint" / "guides"
AWS_JOB = "aws__option_a_using_torchrun_kubernetes_job_r.yaml"
GCP_JOB = "gcp__option_a_using_torchrun_kubernetes_job_r.yaml"
GKE_JOB = "gcp_infrastructure__multi_node_training_on_gke.yaml"
AWS_KUBEFLOW = "aws__option_b_using_kubeflow_training_operato.yaml"
GCP_KUBEFLOW = "gcp__option_c_using_kubeflow_training_operato.yaml"
SCALED = "quickstart__scale_to_multiple_nodes.yaml"
HANDLER = "gcp_infrastructure__preemptible_spot_vms_2.py"


@pytest.fixture
def broken(warm_python) -> Callable[..., dict]:
    """A function from a manifest to how its rehearsal failed."""

    def run(path: Path | str, *flags: str, limit: str = "5m") -> dict:
        answer = rehearse(str(path), "--processes", "1", "--limit", limit, *flags, python=warm_python)
        assert not answer["verdict"]["is_ok"]
        assert answer["verdict"]["fix"]
        return answer

    return run


@pytest.mark.parametrize(("name", "fix"), [
    (AWS_JOB, "env MASTER_ADDR: torchrec-dlrm-training-0.torchrec-headless, with subdomain: torchrec-headless and a "
              "headless Service torchrec-headless"),
    (GCP_JOB, "env MASTER_ADDR: torchrec-dlrm-training-0.torchrec-dlrm-training, with subdomain: "
              "torchrec-dlrm-training and a headless Service torchrec-dlrm-training"),
])
def test_a_variable_that_nobody_defines_ends_every_pod_at_once(broken, name, fix, tmp_path):
    text = (GUIDES / name).read_text().replace("  parallelism: 2\n", "  parallelism: 2\n  backoffLimit: 1\n", 1)
    (tmp_path / "job.yaml").write_text(text)
    answer = broken(tmp_path / "job.yaml")
    assert "$(MASTER_ADDR) is not defined in container torchrec" in answer["verdict"]["sentence"]
    assert "$(MASTER_ADDR):29500" in answer["verdict"]["evidence"]  # torch's own words
    assert fix in answer["verdict"]["fix"]
    assert [end["code"] for end in answer["ends"]] == [1, 1]
    assert "backoffLimit of 1" in answer["verdict"]["checks"][0]["text"]


def test_a_host_that_no_service_makes_resolvable_is_waited_for_in_vain(broken):
    answer = broken(GUIDES / GKE_JOB, limit="12s")
    assert answer["verdict"]["sentence"].startswith(
        "pods 0 and 1 wait for distributed-training-0, a name that does not resolve: "
        "2 pods are to meet, and none has a fixed name")
    assert "completionMode: Indexed" in answer["verdict"]["fix"]
    assert "distributed-training-0" in answer["verdict"]["evidence"]


@pytest.mark.parametrize("name", [AWS_KUBEFLOW, GCP_KUBEFLOW])
def test_the_webhook_refuses_a_container_of_another_name(broken, name):
    answer = broken(GUIDES / name)
    refusal = "webhook refuses it: Worker must have a container named pytorch, and has torchrec"
    assert refusal in answer["verdict"]["sentence"]
    assert answer["ends"] == []


@pytest.mark.parametrize("name", [AWS_KUBEFLOW, GCP_KUBEFLOW])
def test_named_right_it_has_no_script_and_would_train_alone(broken, name, tmp_path):
    text = (GUIDES / name).read_text().replace("- name: torchrec\n", "- name: pytorch\n")
    job = yaml.safe_load(text)
    job["spec"]["runPolicy"] = {"backoffLimit": 1}
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(job))
    answer = broken(tmp_path / "job.yaml")
    assert "does not hold the program or script that the job runs" in answer["verdict"]["sentence"]
    assert "can't open file" in answer["verdict"]["evidence"]
    assert any("torchrun, train_dlrm.py" in one["fix"] for one in answer["lint"])


@pytest.mark.parametrize("name", [AWS_KUBEFLOW, GCP_KUBEFLOW])
def test_with_its_script_each_pod_trains_alone(broken, name, tmp_path):
    text = (GUIDES / name).read_text().replace("- name: torchrec\n", "- name: pytorch\n")
    script = "import os; print('alone', os.environ.get('RANK'), os.environ['PET_NNODES'])"
    text = text.replace("- train_dlrm.py", f"- -c\n              - {json.dumps(script)}")
    (tmp_path / "job.yaml").write_text(text)
    answer = broken(tmp_path / "job.yaml")
    # with an elasticPolicy the first worker that ends well ends the job, so the other may not be waited for
    assert {end["code"] for end in answer["ends"]} == {0}
    assert "each pod trains alone" in answer["verdict"]["sentence"]
    assert "torchrun" in answer["verdict"]["fix"]


def test_a_part_of_a_manifest_is_none(capfd):
    from embark.__main__ import run

    assert run(["rehearse", str(GUIDES / SCALED)]) == 64
    assert "only a part of one" in capfd.readouterr().err


@pytest.mark.parametrize(("num_nodes", "sentence"), [
    (2, "pods 0, 1, 2 and 3 cannot meet: parallelism makes 4 pods and --nnodes=2 waits for 2"),
    (8, "pods 0, 1, 2 and 3 cannot meet: parallelism makes 4 pods and --nnodes=8 waits for 8"),
])
def test_job_scaled_by_parallelism_alone_waits_for_ever(broken, num_nodes, sentence, tmp_path):
    documents = list(yaml.safe_load_all(render_job(job_of("p4d.24xlarge"))[0].text))
    job = next(one for one in documents if one["kind"] == "Job")
    scaled = yaml.safe_load((GUIDES / SCALED).read_text())["spec"]
    job["spec"] |= scaled
    template = job["spec"]["template"]["spec"]["containers"][0]
    template["command"][2] = template["command"][2].replace("--nnodes=2", f"--nnodes={num_nodes}")
    (tmp_path / "job.yaml").write_text(yaml.safe_dump_all(documents))
    answer = broken(tmp_path / "job.yaml", limit="4s")
    assert answer["verdict"]["sentence"] == sentence
    assert answer["ends"] == []
    assert "--nnodes=4, from the same number as parallelism" in answer["verdict"]["fix"]


def test_a_handler_that_ends_with_0_is_counted_as_done_untrained(broken, tmp_path):
    """The handler of the guide, word for word, in a Job that runs it."""
    handler = (GUIDES / HANDLER).read_text().partition("# Also save")[0]
    script = ("import time\nmodel = optimizer = epoch = step = None\n"
              f"def save_checkpoint(*_): pass\n{handler}\nprint('ready', flush=True)\ntime.sleep(600)\n")
    assert "sys.exit(0)" in script
    documents = [
        {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "code"}, "data": {"train.py": script}},
        {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "spot"}, "spec": {
            "completionMode": "Indexed", "completions": 1, "parallelism": 1, "template": {"spec": {
                "restartPolicy": "Never",
                "containers": [{"name": "training", "image": "any", "command": ["python", "/code/train.py"],
                                "resources": {"limits": {"nvidia.com/gpu": 4}},
                                "volumeMounts": [{"name": "code", "mountPath": "/code"}]}],
                "volumes": [{"name": "code", "configMap": {"name": "code"}}]}}}},
    ]
    (tmp_path / "job.yaml").write_text(yaml.safe_dump_all(documents))
    answer = broken(tmp_path / "job.yaml", "--preempt", "0@8s")
    assert answer["verdict"]["checks"][0]["text"] == "Job spot is complete"  # so the cluster believes
    assert "spot-0 exited with 0 after SIGTERM: the Job counts it as complete" in answer["verdict"]["sentence"]
    assert "75" in answer["verdict"]["fix"]
