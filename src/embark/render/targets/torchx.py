"""A TorchX component, `cloud_component.py`: the run as an AppDef for TorchX's Kubernetes scheduler."""

import shlex
from collections.abc import Mapping

from embark.render.command import (
    SPEC_VARIABLE,
    WAIT_S,
    WRITE_SPEC,
    WRITTEN_SPEC_PATH,
    encoded_spec,
    ranks_line,
    ranks_words,
)
from embark.render.folder import File
from embark.render.job import MAX_RESTARTS, PORT, Job
from embark.render.pod import node_selector, storage_settings
from embark.render.settings import fabric_needs, settings_of
from embark.render.shell_text import python_text
from embark.render.yaml_text import plain


def render_torchx(job: Job) -> list[File]:
    return [File("cloud_component.py", component(job))]


def component(job: Job) -> str:
    """Python source. Every value of the spec is put in as a literal."""
    env = {setting.name: setting.value for setting in settings_of(job)}
    env |= {name: value for name, value, _ in storage_settings(job)}
    env |= {"HOME": "/tmp", SPEC_VARIABLE: encoded_spec(job)}
    devices: dict[str, int] = {}
    resource, count = job.machine.fabric.kubernetes_resource, job.machine.num_fabric_devices
    if resource and count and job.num_nodes > 1:
        devices[resource] = count
    values = {
        "NAME": job.name, "IMAGE": job.image, "NUM_NODES": job.num_nodes, "NUM_PROCESSES": job.num_processes,
        "NUM_GPUS": job.num_processes, "NUM_CPUS": job.num_cpus or job.num_processes,
        "MEMORY_MB": (job.memory_gib or 8) * 1024, "DEVICES": devices, "LABELS": plain(node_selector(job)),
        "ENVIRONMENT": env, "MAX_RETRIES": MAX_RESTARTS,
        "START": _start(job), "PORT": PORT, "WAIT_S": WAIT_S,
    }
    about = (f"Trains {job.title}, by TorchX. The cluster needs Volcano. TorchX writes no tolerations: GPU nodes "
             "must have no taint, or the API server the ExtendedResourceToleration plugin. "
             "torchx run --workspace '' -s kubernetes "
             f"-cfg queue=default,namespace={job.namespace} cloud_component.py:train")
    return python_text("cloud_component.py.j2", values, about=about)


def component_here(*, name: str, num_nodes: int, num_processes: int, use_gpu: bool, python: str, spec_path: str,
                   port: int, env: Mapping[str, str]) -> str:
    """The same for processes of this machine, by TorchX's `local_cwd`: no image, and a spec that lies here."""
    line = ranks_line([python, *ranks_words(spec_path=spec_path)[1:]], "MEETING")
    values = {
        "NAME": name, "IMAGE": "", "NUM_NODES": num_nodes, "NUM_PROCESSES": num_processes,
        "NUM_GPUS": num_processes if use_gpu else 0, "NUM_CPUS": num_processes, "MEMORY_MB": 1024, "DEVICES": {},
        "LABELS": {}, "ENVIRONMENT": dict(env), "MAX_RETRIES": 0, "START": f"exec {line}", "PORT": port,
        "WAIT_S": WAIT_S,
    }
    return python_text("cloud_component.py.j2", values, about=f"Trains {name} on this machine, by TorchX.")


def _start(job: Job) -> str:
    """What the shell of a replica does, but for where it meets the others."""
    script = fabric_needs(job).env_script
    read = [f". {shlex.quote(script)}"] if script else []
    return " && ".join([WRITE_SPEC, *read, f"exec {ranks_line(ranks_words(spec_path=WRITTEN_SPEC_PATH), 'MEETING')}"])
