"""Every manifest of the examples can be rehearsed as it stands; and when Ctrl-C comes."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from embark.errors import Interrupted
from embark.rehearse.downscale import BUCKETS, launch_of
from embark.rehearse.manifest import manifest_texts
from embark.rehearse.rehearsal import RehearsalOptions, StopSignals, prepare

EXAMPLES = Path(__file__).parents[3] / "examples" / "cloud_deployment"
FILES = sorted(path for name in ("kubernetes_job", "jobset", "trainjob", "pytorchjob")
               for path in EXAMPLES.glob(f"*/{name}.yaml"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_the_examples_pods_find_each_other_and_fit_this_machine(path):
    prepared = prepare(manifest_texts(path), str(path), RehearsalOptions(num_processes=2, num_steps=50))
    workload = prepared.workload
    assert workload.refusal is None
    assert len(workload.pods) == 2
    for pod in workload.pods:
        launch = launch_of(pod)
        assert launch is not None
        assert len(workload.names.pods_of(launch.endpoint_host)) == 1
        assert launch.nproc == 2
        assert not pod.missing
        assert pod.memory_bytes is None
    assert prepared.run is not None
    assert prepared.run.spec.train.num_steps == 50
    assert prepared.run.folder.startswith(BUCKETS)
    changes = " ".join(map(str, prepared.changes))
    assert "nvidia.com/gpu: 8" in changes
    assert "object store" in changes or "store.root" in changes


def test_there_are_examples_of_every_kind_on_every_cloud():
    assert len(FILES) == 13


def test_ctrl_c_waits_until_a_pod_that_starts_is_known():
    stops, started = StopSignals(), []

    def start() -> None:
        with stops.deferred():
            stops.handle(signal.SIGINT, None)
            started.append("pod")

    with pytest.raises(Interrupted, match="SIGINT"):
        start()
    assert started == ["pod"]
    with pytest.raises(Interrupted, match="SIGTERM"):
        stops.handle(signal.SIGTERM, None)
    stops.is_over = True
    stops.handle(signal.SIGINT, None)  # all is being taken away already
