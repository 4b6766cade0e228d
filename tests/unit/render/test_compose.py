"""docker compose: one host, its GPUs, and words that compose does not read."""

from __future__ import annotations

import tomllib

import yaml
from render_jobs import job_of

from embark.render.image import render_compose
from embark.spec import resolve


def compose_of(**options) -> dict:
    job = job_of("a2-highgpu-8g", nodes=1, target="compose", **options)
    return yaml.safe_load(next(file.text for file in render_compose(job) if file.path == "docker-compose.yaml"))


def test_the_service_has_the_host_s_gpus_and_time_to_save():
    service = compose_of()["services"]["train"]
    assert service["deploy"]["resources"]["reservations"]["devices"][0]["count"] == 8
    assert "--nproc-per-node=8" in service["command"]
    assert service["stop_grace_period"] == "120s"
    assert service["environment"]["EMBARK_GRACE_S"] == "120"
    assert service["restart"] == "on-failure:3"


def test_local_runs_outlive_the_container():
    found = compose_of(root="my runs")
    assert {"type": "volume", "source": "runs", "target": "/scratch/my runs"} in found["services"]["train"]["volumes"]
    assert found["volumes"] == {"runs": {}}
    assert "volumes" not in compose_of(root="gs://bucket/runs")


def test_a_dollar_sign_is_not_for_compose_to_read():
    service = compose_of(data="/data $(id) ${HOME}")["services"]["train"]
    mount = next(volume for volume in service["volumes"] if volume["target"].startswith("/data"))
    assert mount["source"] == mount["target"] == "/data $$(id) $${HOME}"


def test_the_spec_lies_beside_it():
    job = job_of("a2-highgpu-8g", nodes=1, target="compose", data="/it's \"x\" é")
    text = next(file.text for file in render_compose(job) if file.path == "spec.toml")
    assert resolve(tomllib.loads(text)) == job.spec


def test_the_container_reads_relative_data_at_the_host_s_own_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    job = job_of("a2-highgpu-8g", nodes=1, target="compose", data="prepared")
    files = {file.path: file.text for file in render_compose(job)}
    mounts = yaml.safe_load(files["docker-compose.yaml"])["services"]["train"]["volumes"]
    there = str(tmp_path / "prepared")
    assert {"type": "bind", "source": there, "target": there, "read_only": True} in mounts
    assert tomllib.loads(files["spec.toml"])["data"]["path"] == there
