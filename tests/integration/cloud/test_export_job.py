"""The guides' commands that export in the cluster, run by the real kubectl."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest
from integration.account.guide import REPOSITORY, read_guide
from integration.cloud.kubernetes_api import KubernetesApi, kubernetes_api
from integration.cloud.kubernetes_launch import settle, until
from limits import HANG_S

pytestmark = pytest.mark.slow

FOLDER = REPOSITORY / "examples" / "cloud_deployment" / "azure"
LABELS = {"batch.kubernetes.io/job-name": "dlrm-export"}


@pytest.fixture
def api(tmp_path, monkeypatch):
    with kubernetes_api() as server:
        settle(server, tmp_path, monkeypatch)
        yield server


@contextmanager
def exporting(api: KubernetesApi) -> Iterator[subprocess.Popen[str]]:
    """Run the commands up to the one that waits for the Job, whose pod runs."""
    block, *_ = (one for one in read_guide(FOLDER / "README.md") if "-f export_job.yaml" in one.text)
    api.put("namespaces", "embark", "")
    process = subprocess.Popen(["bash", "-ec", block.text], cwd=FOLDER, stdout=subprocess.PIPE,
                               stderr=subprocess.STDOUT, text=True, start_new_session=True)
    try:
        until(lambda: api.names("jobs") or process.poll() is not None)
        api.objects[("jobs", "embark", "dlrm-export")]["spec"]["selector"] = {"matchLabels": LABELS}
        api.pod("dlrm-export-a", "dlrm-export", index=0, container="export", phase="Running", labels=LABELS)
        until(lambda: any("watch" in path for _, path in api.requests) or process.poll() is not None)
        yield process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(HANG_S)


def test_waiting_for_an_export_ends_when_its_job_fails(api):
    with exporting(api) as process:
        api.log("dlrm-export-a", "the run has no checkpoint")
        api.finish("jobs", "dlrm-export", "Failed")
        output, _ = process.communicate(timeout=HANG_S)
    assert process.returncode == 1, output
    assert "the run has no checkpoint" in output
    assert "timed out waiting for the condition on jobs/dlrm-export" in output


def test_waiting_for_an_export_ends_when_its_job_is_complete(api):
    with exporting(api) as process:
        api.finish("jobs", "dlrm-export")
        output, _ = process.communicate(timeout=HANG_S)
    assert process.returncode == 0, output
    assert output.count("job.batch/dlrm-export condition met") == 2
