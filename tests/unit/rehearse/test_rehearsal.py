"""Every manifest of the examples can be rehearsed as it stands."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass
from pathlib import Path

import pytest

from embark.errors import Interrupted
from embark.rehearse.controller import Observer
from embark.rehearse.downscale import BUCKETS, launch_of
from embark.rehearse.manifest import manifest_texts, read_texts
from embark.rehearse.processes import Processes
from embark.rehearse.rehearsal import Prepared, RehearsalReport, rehearse
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Stopped(Prepared):
    """Pods that a signal stops; the program goes on to where it looks."""

    steps: list[str]

    def run_pods(self, processes: Processes, observer: Observer, limit_s: float) -> RehearsalReport:
        observer.check()
        os.kill(os.getpid(), signal.SIGTERM)
        self.steps.append("between two instructions")
        observer.check()
        raise AssertionError("the check raises")


def test_a_signal_ends_a_rehearsal_where_nothing_is_half_done():
    before = signal.getsignal(signal.SIGTERM)
    stopped = Stopped(kind="Job", name="j", title="", names={}, changes=(), findings=(), steps=[])
    with pytest.raises(Interrupted, match="stopped by SIGTERM"):
        rehearse(stopped, Observer(lambda *_: None, lambda _: None))
    assert stopped.steps == ["between two instructions"]
    assert signal.getsignal(signal.SIGTERM) is before
