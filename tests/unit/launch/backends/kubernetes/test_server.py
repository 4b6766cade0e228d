"""From what a cluster says of a server to one state and one reason."""

from __future__ import annotations

from typing import Any

import pytest

from embark.launch.backends.kubernetes.pods import PodStatus
from embark.launch.backends.kubernetes.server import server_status


def pod(name: str, phase: str = "Running", restarts: int = 0, **state: Any) -> PodStatus:
    return PodStatus.of({"metadata": {"name": name}, "status": {"phase": phase, "containerStatuses": [
        {"name": "server", "restartCount": restarts, "state": state or {"running": {}}}]}}, "server")


def deployment(ready: int, wanted: int = 2, *conditions: dict[str, str]) -> dict[str, Any]:
    return {"kind": "Deployment", "metadata": {"creationTimestamp": "2026-11-15T09:00:00Z"},
            "spec": {"replicas": wanted}, "status": {"readyReplicas": ready, "conditions": list(conditions)}}


LATE = {"type": "Progressing", "status": "False", "reason": "ProgressDeadlineExceeded"}
PULL = {"waiting": {"reason": "ImagePullBackOff", "message": "Back-off pulling image"}}
CRASH = {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off 40s"}}


@pytest.mark.parametrize(("found", "pods", "state", "says"), [
    (deployment(2), [pod("a"), pod("b")], "running", ""),
    (deployment(2), [pod("a"), pod("b", restarts=3)], "running", "restarted 3 times"),
    (deployment(1), [pod("a"), pod("b", "Pending", **PULL)], "running", "1 of 2 replicas ready; b: "),
    (deployment(0), [], "pending", "0 of 2 replicas ready; no pod created yet"),
    (deployment(0), [pod("a", restarts=4, **CRASH)], "restarting", "0 of 2 replicas ready; a: "),
    (deployment(0, 2, LATE), [pod("a", restarts=4, **CRASH)], "failed", "0 of 2 replicas ready; a: "),
    ({"kind": "InferenceService", "metadata": {}, "status": {"conditions": [{"type": "Ready", "status": "True"}]}},
     [pod("a")], "running", ""),
    ({"kind": "InferenceService", "metadata": {}, "status": {}}, [pod("a", "Pending", **PULL)], "pending",
     "0 of 2 replicas ready; a: "),
], ids=str)
def test_the_state_of_a_server(found, pods, state, says):
    status = server_status(found, pods, [], least=2)
    assert status.state == state
    assert status.reason.startswith(says)
    assert len(status.replicas) == len(pods)
