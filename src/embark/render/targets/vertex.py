"""Vertex AI: the run as a CustomJob, for gcloud."""

import shlex

from embark.errors import Mistake, SpecError
from embark.render.command import SPEC_VARIABLE, WRITE_SPEC, WRITTEN_SPEC_PATH, encoded_spec, ranks_line, ranks_words
from embark.render.folder import File
from embark.render.job import PORT, Job
from embark.render.settings import settings_of
from embark.render.shell_text import script_file
from embark.render.yaml_text import note, yaml_text
from embark.values import JsonDict

BOOT_DISK_GB = 200
ACCELERATORS = {
    "T4": "NVIDIA_TESLA_T4", "V100": "NVIDIA_TESLA_V100", "L4": "NVIDIA_L4", "A100": "NVIDIA_TESLA_A100",
    "A100-80GB": "NVIDIA_A100_80GB", "H100": "NVIDIA_H100_80GB", "H200": "NVIDIA_H200_141GB", "B200": "NVIDIA_B200",
    "GB200": "NVIDIA_GB200",
}
"""Vertex AI's names of the catalog's GPUs."""


def render_vertex(job: Job) -> list[File]:
    about = f"Trains {job.spec.name} on Vertex AI: {job.num_nodes} x {job.machine.name}."
    return [
        File("vertex_job.yaml", yaml_text([custom_job_spec(job)], about=f"{about} vertex_job.sh submits it.")),
        script_file("vertex_job.sh", "vertex_job.sh.j2", job,
                    about=f"{about} It needs gcloud, and roles/aiplatform.user."),
    ]


def custom_job_spec(job: Job) -> JsonDict:
    """Return a CustomJobSpec as `gcloud ai custom-jobs create --config` reads it."""
    pools = worker_pools(job)
    scheduling: JsonDict = {
        "strategy": {"spot": "SPOT", "flex-start": "FLEX_START"}.get(job.capacity, "STANDARD"),
        "restartJobOnWorkerRestart": note(True, "all machines start again together, from the last checkpoint"),
    }
    if job.place.max_hours is not None:
        scheduling["timeout"] = f"{max(1, round(job.place.max_hours * 3600))}s"
    spec: JsonDict = {
        "workerPoolSpecs": note(pools, "the first pool is the one machine that the others meet at"),
        "scheduling": scheduling,
        "baseOutputDirectory": {"outputUriPrefix": f"{job.spec.store.root.rstrip('/')}/{job.spec.name}/vertex"},
    }
    if job.place.identity:
        spec["serviceAccount"] = job.place.identity
    return spec


def worker_pools(job: Job) -> list[JsonDict]:
    return [{
        "machineSpec": machine_spec(job) | reservation_spec(job),
        "replicaCount": num_replicas,
        "diskSpec": {"bootDiskType": "pd-ssd", "bootDiskSizeGb": BOOT_DISK_GB},
        "containerSpec": {
            "imageUri": job.image,
            "command": ["/bin/sh", "-c", _start(job)],
            "env": [{"name": name, "value": value} for name, value in _environment(job).items()],
        },
    } for num_replicas in (1, job.num_nodes - 1 if not job.is_tpu else 0) if num_replicas]


def reservation_spec(job: Job) -> JsonDict:
    """Return the part of a machine's spec that names the reservation; it has to be shared with Vertex AI."""
    if not job.has_reservation:
        return {}
    project, name = job.reservation
    uri = f"projects/{project or job.place.account}/zones/{job.location.zone}/reservations/{name}"
    return {"reservationAffinity": {"reservationAffinityType": "SPECIFIC_RESERVATION",
                                    "key": "compute.googleapis.com/reservation-name", "values": [uri]}}


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


def _environment(job: Job) -> dict[str, str]:
    # Vertex AI brings the fabric's plugin and its settings itself.
    env = {setting.name: setting.value for setting in settings_of(job, is_pod=False, has_fabric=False)}
    return {**env, SPEC_VARIABLE: encoded_spec(job)}


def _refused(job: Job, what: str, fix: str) -> SpecError:
    return SpecError([Mistake("", "place.machine", job.machine.name, what, fix)])
