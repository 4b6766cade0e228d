"""The guide of a deployment that follows a stream, walked: its commands as they stand there, by the real kubectl."""

from __future__ import annotations

import base64
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from integration.cloud.kubernetes_api import KubernetesApi, kubernetes_api
from integration.cloud.kubernetes_launch import settle

GUIDE = Path(__file__).parents[3] / "docs" / "guides" / "fresh-deployment.md"
NOT_HERE = {
    "embark image": "needs a registry: tests/integration/cloud/test_image.py",
    "embark rehearse": "runs every part: tests/unit/rehearse/test_stream.py",
}
PARTS = {"clicks-0": "trainer", "clicks-nats-0": "broker", "clicks-publish-aa": "publisher", "clicks-serve-bb": "serve"}


@pytest.fixture
def api(tmp_path, monkeypatch):
    with kubernetes_api() as server:
        settle(server, tmp_path, monkeypatch)
        yield server


def bash(text: str, folder: Path) -> str:
    done = subprocess.run(["bash", "-euo", "pipefail", "-c", text], cwd=folder, text=True, stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT, check=False,
                          env={**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"})
    assert done.returncode == 0, f"{text}\n{done.stdout}"
    return done.stdout


def start_pods(api: KubernetesApi) -> None:
    """As the controllers of a cluster do it."""
    for name, component in PARTS.items():
        api.pod(name, "clicks", index=0, container=component, phase="Running",
                labels={"app.kubernetes.io/component": component})
        api.log(name, f"{component} begins")
    for plural, name in (("statefulsets", "clicks"), ("statefulsets", "clicks-nats"), ("deployments", "clicks-publish"),
                         ("deployments", "clicks-serve")):
        api.put(plural, name, status={"readyReplicas": 2})
    api.put("persistentvolumeclaims", "data-clicks-nats-0")


def test_the_guide_deploys_watches_and_removes_a_fresh_model(api, tmp_path):
    text = GUIDE.read_text()
    (tmp_path / "clicks.toml").write_text(re.search(r"^```toml file=clicks.toml\n(.*?)^```$", text, re.M | re.S)[1])
    skipped, output = set(), ""
    for block in re.findall(r"^```bash(?: run)?\n(.*?)^```$", text, re.M | re.S):
        if reason := next((name for name in NOT_HERE if block.startswith(name)), ""):
            skipped.add(reason)
            continue
        if block.startswith("embark launch"):  # what `embark image` would have written
            spec = tmp_path / "clicks" / "run.toml"
            spec.write_text(spec.read_text().replace("[place]", '[place]\nimage = "registry.example.com/clicks:1"'))
        if block.startswith("embark cancel"):
            for name in PARTS:
                del api.objects[("pods", "embark", name)]
        output += bash(block, tmp_path)
        if block.startswith("embark launch"):
            assert api.names("statefulsets") == {"clicks", "clicks-nats"}
            assert api.names("deployments") == {"clicks-publish", "clicks-serve"}
            start_pods(api)
    assert skipped == set(NOT_HERE)
    for component in PARTS.values():
        assert f"{component} begins" in output
    secret = api.objects[("secrets", "embark", "clicks-nats")]["data"]
    options = tomllib.loads(base64.b64decode(secret["options.toml"]).decode())
    assert options == {"token": base64.b64decode(secret["token"]).decode()}
    assert "the broker's disk, claim data-clicks-nats-0, which is paid" in output
    kept = {("namespaces", "embark"), ("serviceaccounts", "embark"), ("serviceaccounts", "embark-serve"),
            ("secrets", "clicks-nats"), ("secrets", "clicks-serve-token")}
    assert {(plural, name) for plural, _, name in api.objects} == kept
