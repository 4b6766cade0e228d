"""docker compose on one host: the run, its spec and its files beside it."""

from typing import Any

from embark.render.command import SPEC_PATH, one_machine
from embark.render.folder import File
from embark.render.job import Job
from embark.render.pod import SCRATCH, storage_settings
from embark.render.settings import grace_s, settings_of
from embark.render.yaml_text import note, yaml_text


def render_compose(job: Job) -> list[File]:
    about = (f"Trains {job.spec.name} on this host's {job.num_processes} accelerators. docker compose up --build. "
             "The host needs NVIDIA's container toolkit.")
    return [File("docker-compose.yaml", yaml_text([compose(job)], about=about)), File("spec.toml", job.spec_toml)]


def compose(job: Job) -> dict[str, Any]:
    environment = {setting.name: _literal(setting.value) for setting in settings_of(job, is_pod=False)}
    environment |= {name: _literal(value) for name, value, _ in storage_settings(job)}
    local = job.spec.store.root
    volumes: list[Any] = [{"type": "bind", "source": "./spec.toml", "target": SPEC_PATH, "read_only": True}]
    if "://" not in local:
        path = local if local.startswith("/") else f"{SCRATCH}/{local}"
        volumes.append(note({"type": "volume", "source": "runs", "target": _literal(path)},
                            "checkpoints outlive the container"))
    data = job.spec.data.path
    if job.spec.data.kind != "synthetic" and data and "://" not in data:
        target = data if data.startswith("/") else f"{SCRATCH}/{data}"
        volumes.append({"type": "bind", "source": _literal(data if data.startswith("/") else f"./{data}"),
                        "target": _literal(target), "read_only": True})
    service: dict[str, Any] = {
        "image": job.image,
        "build": {"context": "."},
        "command": [_literal(word) for word in one_machine(job)],
        "environment": environment,
        "working_dir": SCRATCH,
        "volumes": volumes,
        "shm_size": note(f"{job.shm_gib}gb", "NCCL and data loaders share memory; a container's own is 64 MB"),
        "ulimits": {"memlock": -1},
        "stop_grace_period": note(f"{grace_s(job)}s", "to save after a stop"),
        "restart": note("on-failure:3", "code 75 is preempted and saved: it goes on from there"),
        "deploy": {"resources": {"reservations": {"devices": [
            {"driver": "nvidia", "count": job.num_processes, "capabilities": ["gpu"]},
        ]}}},
    }
    found: dict[str, Any] = {"name": job.name, "services": {"train": service}}
    return {**found, "volumes": {"runs": {}}} if "://" not in local else found


def _literal(text: str) -> str:
    """compose reads $ in any value."""
    return text.replace("$", "$$")
