"""A rendered server, rehearsed: two replicas behind one address, one killed under load."""

from __future__ import annotations

import json
from functools import cache
from types import SimpleNamespace

import pytest
from exported_runs import draw_rows, prepared_spec, save_run, write_csv

from embark import export_run
from embark.catalog import load_catalog
from embark.cli.console import Console
from embark.cli.rehearse import rehearse
from embark.errors import UserError
from embark.rehearse.manifest import read_texts
from embark.rehearse.server import find_server, prepare_server
from embark.render.job import make_job
from embark.render.render import own_files
from embark.spec import load_spec

SETS = ("place.target=serve", "store.root=s3://bucket/runs")


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("models")
    spec = prepared_spec(folder, write_csv(folder / "a.csv", draw_rows(100, 0)),
                         write_csv(folder / "b.csv", draw_rows(20, 1)))
    return export_run(save_run(spec).uri, str(folder / "models")).uri


@cache
def text_of(*sets: str) -> str:
    files = own_files(make_job(load_spec("quickstart", [*SETS, *sets]), load_catalog()))
    return next(file.text for file in files if file.path == "serve.yaml")


def prepared(models: str, text: str):
    texts = {"serve.yaml": text}
    return prepare_server(texts, read_texts(texts), models)


@pytest.mark.parametrize(("autoscaler", "metric"), [
    ("hpa", "cpu"), ("adapter", "embark_serve_requests_in_flight"), ("keda", "embark_serve_requests_in_flight")])
def test_a_deployment_becomes_two_replicas_that_serve_the_given_artifact(models, autoscaler, metric):
    found = prepared(models, text_of(f"serve.autoscaler={autoscaler}", "serve.min_replicas=4"))
    assert found.metric == metric
    assert found.service.is_ok
    assert found.probe == "/v2/health/ready"
    assert len(found.pods) == 2
    for pod, port in zip(found.pods, found.ports, strict=True):
        assert pod.words == ("embark", "serve", models, "--host", "127.0.0.1", "--port", str(port), "--workers", "2")
    assert set(json.loads(found.rows)["rows"][0]) >= {"word", "tags", "price"}


def test_a_service_that_leads_nowhere_is_found(models):
    text = text_of()
    assert not prepared(models, text.replace("targetPort: http", "targetPort: web")).service.is_ok
    for old, new, why in (('- --port\n        - "8000"', '- --port\n        - "8080"', "the program listens on 8080"),
                          ("/v2/health/live\n            port: http", "/v2/health/live\n            port: 80",
                           "livenessProbe failed: dial tcp :80"),
                          ("port: 8000\n    from:", "port: 80\n    from:", "lets nobody in to port 8000, only to 80"),
                          ('- "0.0.0.0"', '- "127.0.0.1"', "the program listens on 127.0.0.1 alone")):
        assert old in text
        check = prepared(models, text.replace(old, new)).service
        assert (check.is_ok, why in check.text) == (False, True), check.text
    alone = "---\n".join(part for part in text.split("---\n") if "kind: Service\n" not in part)
    assert prepared(models, alone).service.text == "no Service selects the pods"


def test_what_cannot_be_rehearsed_is_refused(models, tmp_path):
    with pytest.raises(UserError, match="the artifact cannot be read here"):
        prepared(str(tmp_path / "nothing"), text_of())
    assert find_server(read_texts({"a.yaml": text_of().replace("- serve\n", "- train\n")})) is None
    with pytest.raises(UserError, match="by killing one of its replicas"):
        rehearse("quickstart", set_=SETS, artifact=models, kill=("0@3s",))
    with pytest.raises(UserError, match="--artifact applies to servers"):
        rehearse("quickstart", set_=("place.cloud=aws", "store.root=s3://b/r"), artifact=models)


@pytest.mark.slow
def test_one_of_two_replicas_is_killed_under_load_and_no_request_fails(models, monkeypatch, capsys, warm_python):
    monkeypatch.setattr("embark.rehearse.processes.sys", SimpleNamespace(executable=warm_python))
    monkeypatch.setenv("COLUMNS", "200")
    assert rehearse("quickstart", set_=SETS, artifact=models, console=Console(json=True)) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["num_failed"] == 0
    assert report["num_answered"] >= 100
    assert {check["name"]: check["is_ok"] for check in report["verdict"]["checks"]} == dict.fromkeys(
        ("Service", "ready", "requests", "comes back", "autoscaler", "ends on SIGTERM"), True)


@pytest.mark.slow
def test_one_replica_alone_fails_requests_and_the_verdict_says_why(models, monkeypatch, capsys, warm_python):
    monkeypatch.setattr("embark.rehearse.processes.sys", SimpleNamespace(executable=warm_python))
    sets = (*SETS, "serve.min_replicas=1")
    assert rehearse("quickstart", set_=sets, artifact=models, console=Console(json=True)) == 1
    verdict = json.loads(capsys.readouterr().out)["verdict"]
    assert "failed" in verdict["sentence"]
    assert "serve.min_replicas = 2" in verdict["fix"]
