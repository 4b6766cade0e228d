"""docker compose on one host: the run, its spec and its files beside it."""

from embark.render.command import SPEC_PATH, one_machine
from embark.render.folder import File
from embark.render.job import Job
from embark.render.pod import SCRATCH, storage_settings
from embark.render.settings import grace_s, settings_of
from embark.render.shell_text import job_text
from embark.spec import to_toml
from embark.spec.paths import with_absolute_paths
from embark.store.run_dir import SPEC


def render_compose(job: Job) -> list[File]:
    environment = {setting.name: _literal(setting.value) for setting in settings_of(job, is_pod=False)}
    environment |= {name: _literal(value) for name, value, _ in storage_settings(job)}
    spec = with_absolute_paths(job.spec)  # the container sees the data at the host's own path
    runs, data = spec.store.root, spec.data.path
    is_local = job.spec.data.kind != "synthetic" and data and "://" not in data
    return [
        File("docker-compose.yaml", job_text(
            "docker-compose.yaml.j2", job, environment=environment, command=list(map(_literal, one_machine(job))),
            runs="" if "://" in runs else _inside(runs), data=_literal(data) if is_local else "", scratch=SCRATCH,
            spec_path=SPEC_PATH, grace_s=grace_s(job))),
        File(SPEC, to_toml(spec, only_set=True)),
    ]


def _inside(path: str) -> str:
    return _literal(path if path.startswith("/") else f"{SCRATCH}/{path}")


def _literal(text: str) -> str:
    """compose reads $ in any value."""
    return text.replace("$", "$$")
