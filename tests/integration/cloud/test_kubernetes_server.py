"""A server's whole life on Kubernetes: kubectl itself, against an API over HTTP."""

from __future__ import annotations

import pytest
from integration.cloud.kubernetes_api import kubernetes_api
from integration.cloud.kubernetes_launch import settle, spec_of

from embark.cli.console import Console
from embark.cli.launch import launch_run
from embark.cli.status import cancel as cancel_command
from embark.cli.status import logs as logs_command
from embark.launch.backend import backend_of
from embark.launch.run_registry import find_run
from embark.launch.shell import Shell

SERVE = ("place.target=serve", "place.machine=", "place.nodes=1")
LABELS = {"app.kubernetes.io/component": "serve"}


@pytest.fixture
def api(tmp_path, monkeypatch):
    with kubernetes_api() as server:
        settle(server, tmp_path, monkeypatch)
        yield server


def test_a_server_is_launched_changed_and_cancelled(api, capsys):
    assert launch_run(Console(), spec_of(*SERVE), yes=True, dry_run=False) == 0
    output = capsys.readouterr().out
    assert "dlrm-serve: 2 to 10 replicas of" in output
    assert "a month on demand" in output
    assert api.names("deployments") == api.names("horizontalpodautoscalers") == {"dlrm-serve"}
    handle = find_run("dlrm-serve").handle
    server = backend_of(handle, Shell(), print)
    assert handle.run_uri == "s3://training/runs/dlrm/export"
    assert server.status(handle).state == "pending"

    for number in (0, 1):
        api.pod(f"dlrm-serve-{number}", "dlrm", index=number, container="server", phase="Running", labels=LABELS)
    api.pod("dlrm-0-aaaaa", "dlrm", index=0, phase="Running")  # of the training, which has the same name
    api.put("deployments", "dlrm-serve", status={"readyReplicas": 2})
    status = server.status(handle)
    assert (status.state, [one.name for one in status.replicas]) == ("running", ["dlrm-serve-0", "dlrm-serve-1"])
    api.log("dlrm-serve-1", "serving dlrm, version 3, on http://0.0.0.0:8000")
    assert logs_command("dlrm-serve", console=Console()) == 0
    assert "dlrm-serve-1 | serving dlrm, version 3" in capsys.readouterr().out

    # Again, with other settings: the same object is changed.
    assert launch_run(Console(), spec_of(*SERVE, "serve.tables=int8"), yes=True, dry_run=False) == 0
    assert api.names("deployments") == {"dlrm-serve"}
    for number in (0, 1):
        del api.objects[("pods", "embark", f"dlrm-serve-{number}")]
    capsys.readouterr()
    assert cancel_command("dlrm-serve", yes=True, console=Console()) == 0
    output = capsys.readouterr().out
    for kind in ("deployments", "horizontalpodautoscalers", "poddisruptionbudgets", "services"):
        assert api.names(kind) == set()
    assert "the exported model in s3://training/runs/dlrm/export" in output
    assert ("pods", "embark", "dlrm-0-aaaaa") in api.objects
    assert server.status(handle).state == "gone"

