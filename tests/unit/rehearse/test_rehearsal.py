"""Every manifest of the examples can be rehearsed as it stands."""

from __future__ import annotations

from pathlib import Path

import pytest

from embark.rehearse.downscale import BUCKETS, launch_of
from embark.rehearse.manifest import manifest_texts, read_texts
from embark.rehearse.training import prepare_training

EXAMPLES = Path(__file__).parents[3] / "examples" / "cloud_deployment"
FILES = sorted(path for name in ("kubernetes_job", "jobset", "trainjob", "pytorchjob")
               for path in EXAMPLES.glob(f"*/{name}.yaml"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_the_examples_pods_find_each_other_and_fit_this_machine(path):
    texts = manifest_texts(path)
    prepared = prepare_training(texts, read_texts(texts), num_steps=50)
    workload = prepared.workload
    assert workload.refusal is None
    assert len(workload.pods) == 2
    for pod in workload.pods:
        launch = launch_of(pod)
        assert launch is not None
        assert len(workload.names[launch.endpoint_host]) == 1
        assert launch.nproc == 2
        assert not pod.missing
    assert prepared.run is not None
    assert prepared.run.spec.train.num_steps == 50
    assert prepared.run.folder.startswith(BUCKETS)
    changes = " ".join(map(str, prepared.changes))
    assert "nvidia.com/gpu: 8" in changes
    assert "object store" in changes or "store.root" in changes


def test_there_are_examples_of_every_kind_on_every_cloud():
    assert len(FILES) == 13
