"""One rule says which container of a pod trains, for the linter, the rehearsal and the simulated cluster."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from embark.kubernetes.objects import Objects
from embark.kubernetes.pods import PodIdentity, main_container, make_pod, pod_specs, trains
from embark.lint.pods import pods_of
from embark.lint.read import read_sources
from embark.lint.source import SourceFile

PLAIN = {"name": "logger", "command": ["tail", "-f", "log"]}
TORCHRUN = {"name": "ranks", "command": ["sh", "-c", "exec python -m torch.distributed.run train.py"]}


def with_amounts(section: str = "limits", **amounts: object) -> dict:
    return {"name": "trainer", "resources": {section: {name.replace("__", "/"): n for name, n in amounts.items()}}}


@pytest.mark.parametrize(("containers", "name", "expected"), [
    ([PLAIN, with_amounts(**{"nvidia.com__gpu": 8})], "", "trainer"),
    ([PLAIN, with_amounts(**{"google.com__tpu": "4"})], "", "trainer"),
    ([PLAIN, with_amounts(**{"amd.com__gpu": 8})], "", "trainer"),
    ([PLAIN, with_amounts(**{"nvidia.com__mig-1g.5gb": 1})], "", "trainer"),
    ([PLAIN, with_amounts("requests", **{"nvidia.com__gpu": 8})], "", "trainer"),
    ([PLAIN, with_amounts(**{"nvidia.com__gpu": 0}), TORCHRUN], "", "ranks"),
    ([PLAIN, TORCHRUN, with_amounts(**{"nvidia.com__gpu": 1})], "", "trainer"),
    ([PLAIN, TORCHRUN], "", "ranks"),
    ([PLAIN, TORCHRUN], "logger", "logger"),
    ([PLAIN, TORCHRUN], "pytorch", "ranks"),
    ([PLAIN], "", "logger"),
])
def test_accelerators_decide_before_torchrun_and_a_name_before_both(containers, name, expected):
    assert main_container({"containers": containers}, name)["name"] == expected
    if not name:
        job = {"apiVersion": "batch/v1", "kind": "Job", "spec": {"template": {"spec": {"containers": containers}}}}
        files = read_sources([SourceFile.of(Path("job.yaml"), yaml.safe_dump(job))])
        (template,) = pods_of(files.documents[0])
        assert template.main is not None
        assert template.main.name == expected
        assert template.is_training == trains(job["spec"]["template"]["spec"]) == (expected != "logger")


def test_a_pod_without_containers_trains_nothing():
    assert main_container({}) == {}
    assert not trains({})


def test_the_pods_of_any_object_are_found():
    spec = {"containers": [PLAIN]}
    jobset = {"spec": {"replicatedJobs": [{"template": {"spec": {"template": {"spec": spec}}}}] * 2}}
    assert list(pod_specs(jobset)) == [spec, spec]
    assert list(pod_specs({"spec": spec})) == [spec]


def test_a_pod_of_a_tpu_names_its_chips_as_devices():
    pod = make_pod({"spec": {"containers": [PLAIN, with_amounts(**{"google.com__tpu": "4"})]}},
                   PodIdentity(name="p", namespace="n"), Objects(()))
    assert (pod.container, pod.devices, pod.sidecars) == ("trainer", ("google.com/tpu: 4",), ("logger",))
