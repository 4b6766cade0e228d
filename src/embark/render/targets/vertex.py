"""Vertex AI: the run as a CustomJob, for gcloud."""

import shlex

from embark.errors import Mistake, SpecError
from embark.render.command import SPEC_VARIABLE, WRITE_SPEC, WRITTEN_SPEC_PATH, encoded_spec, ranks_line, ranks_words
from embark.render.folder import File, Files
from embark.render.job import PORT, Job
from embark.render.settings import settings_of
from embark.render.shell_text import job_text, script_file
from embark.values import JsonDict

ACCELERATORS = {
    "T4": "NVIDIA_TESLA_T4", "V100": "NVIDIA_TESLA_V100", "L4": "NVIDIA_L4", "A100": "NVIDIA_TESLA_A100",
    "A100-80GB": "NVIDIA_A100_80GB", "H100": "NVIDIA_H100_80GB", "H200": "NVIDIA_H200_141GB", "B200": "NVIDIA_B200",
    "GB200": "NVIDIA_GB200"
}
"""Vertex AI's names of the catalog's GPUs."""


def render_vertex(job: Job) -> Files:
    about = f"{_about(job)} It needs gcloud, and roles/aiplatform.user."
    return [File("vertex_job.yaml", _job_yaml(job)), script_file("vertex_job.sh", "vertex_job.sh.j2", job, about=about)]


def custom_job_spec(job: Job) -> JsonDict:
    """Return a CustomJobSpec as `gcloud ai custom-jobs create --config` reads it."""
    import yaml

    spec: JsonDict = yaml.safe_load(_job_yaml(job))
    return spec


def _job_yaml(job: Job) -> str:
    # Vertex AI brings the fabric's plugin and its settings itself.
    env = {setting.name: setting.value for setting in settings_of(job, is_pod=False, has_fabric=False)}
    rows = [{"name": name, "value": value} for name, value in {**env, SPEC_VARIABLE: encoded_spec(job)}.items()]
    return job_text("gcp/vertex_job.yaml.j2", job, about=_about(job), machine=machine_spec(job), start=_start(job),
                    env=rows)


def _about(job: Job) -> str:
    return f"Trains {job.spec.name} on Vertex AI: {job.num_nodes} x {job.machine.name}."


def machine_spec(job: Job) -> JsonDict:
    machine = job.machine
    if not job.is_tpu:
        name = "NVIDIA_H100_MEGA_80GB" if machine.name.startswith("a3-mega") else ACCELERATORS.get(machine.gpu.name, "")
        if not name:
            raise _refused(job, f"Vertex AI has no {machine.gpu.name}", "one with " + ", ".join(ACCELERATORS))
        return {"machineType": machine.machine_type, "acceleratorType": name, "acceleratorCount": job.num_processes}
    family = machine.name.partition("-")[0]
    if family in ("v2", "v3") and machine.num_hosts == 1:
        return {"machineType": "cloud-tpu", "acceleratorType": f"TPU_{family.upper()}", "acceleratorCount": 8}
    if family in ("v5litepod", "v6e") and job.topology:
        return {"machineType": machine.machine_type, "tpuTopology": job.topology}
    raise _refused(job, f"Vertex AI trains on no {machine.name}", 'take v5e or v6e, or set place.target = "tpu-vm"')


def _start(job: Job) -> str:
    """Return the shell command of a machine. Vertex AI sets RANK and WORLD_SIZE per machine, torchrun sets them per
    rank."""
    if job.is_tpu:
        return f"{WRITE_SPEC} && exec python -m embark train {WRITTEN_SPEC_PATH} --set place.device=tpu"
    if job.num_nodes == 1:
        words = ranks_words("--standalone", f"--nproc-per-node={job.num_processes}", spec_path=WRITTEN_SPEC_PATH)
        return f"{WRITE_SPEC} && exec env -u RANK -u WORLD_SIZE -u MASTER_ADDR -u MASTER_PORT {shlex.join(words)}"
    words = ranks_words(f"--nnodes={job.num_nodes}", f"--nproc-per-node={job.num_processes}",
                        spec_path=WRITTEN_SPEC_PATH)
    line = ranks_line(words, '--node-rank="$RANK"', '--master-addr="$MASTER_ADDR"',
                      f'--master-port="${{MASTER_PORT:-{PORT}}}"')
    return f"{WRITE_SPEC} && exec env -u RANK -u WORLD_SIZE {line}"


def _refused(job: Job, what: str, fix: str) -> SpecError:
    return SpecError([Mistake("", "place.machine", job.machine.name, what, fix)])
