"""A slice of TPUs: a script that asks for it, follows it and gives it back, and what each of its hosts runs."""


from embark.errors import Mistake, SpecError
from embark.render.clouds.gcp import account_steps
from embark.render.command import SPEC_PATH
from embark.render.folder import Files
from embark.render.job import Job
from embark.render.settings import grace_s, settings_of
from embark.render.shell_text import Shell, Words, job_text, job_words, quote, script_file
from embark.render.wheel import WHEELS, fetch_text, upload_words, wheel_requirement
from embark.values import JsonDict
from .vm_node import FINAL_CODES, OFF_PROGRAM, STATE, VENV, off_program, off_unit

RUNTIME_VERSIONS = {
    "v2": "tpu-ubuntu2204-base",
    "v3": "tpu-ubuntu2204-base",
    "v4": "tpu-ubuntu2204-base",
    "v5litepod": "v2-alpha-tpuv5-lite",
    "v5p": "v2-alpha-tpuv5",
    "v6e": "v2-alpha-tpuv6e"
}
"""The system of each generation's hosts. It holds no framework: that comes with the stack."""
JAX = "jax[tpu]==0.10.2"


def render_tpu_vm(job: Job) -> Files:
    """Write `tpu_vm.sh`, and `tpu_node.sh` which every host of the slice runs as root when it starts."""
    machine = job.machine
    about = (f"A {machine.name} of Google Cloud: {machine.num_gpus} chips on {machine.num_hosts} hosts. tpu_vm.sh up "
             "requests it and waits, status shows it, logs N follows host N, down releases it. Half an hour after the "
             "run has ended or failed, the slice is released unless up --keep requested it.")
    about_node = (f"What every host of the slice runs when it starts: one process for its {machine.gpus_per_host} "
                  "chips. The hosts find one another over the slice's own network.")
    node = Shell(f'"{job.name}-${{2:-0}}"') if job.num_nodes > 1 else job.name
    return [
        script_file("tpu_vm.sh", "gcp/tpu_vm.sh.j2", job, runtime_version=runtime_version(job), about=about,
                    steps=account_steps(job), create_words=create_words(job, Shell('"$FIRST_START"')),
                    upload_words=upload_words(job), node=node),
        script_file("tpu_node.sh", "gcp/tpu_node.sh.j2", job, about=about_node, environment=environment(job),
                    final_codes=FINAL_CODES, grace_s=grace_s(job), train_words=train_words(),
                    off_program=off_program(job), off_unit=off_unit(job), off_path=OFF_PROGRAM, **_setup(job))
    ]


def setup_parts(job: Job) -> list[str]:
    """Shell text that writes the spec, and installs the stack if it is missing."""
    return [job_text("gcp/tpu_setup.sh.j2", job, **_setup(job))]


def _setup(job: Job) -> JsonDict:
    return {"state": STATE, "spec_path": SPEC_PATH, "venv": VENV, "packages": packages(WHEELS),
            "fetch_wheel": Shell(fetch_text(job).replace("\n", "\n  "))}


def runtime_version(job: Job) -> str:
    generation = job.machine.name.rpartition("-")[0]
    if generation not in RUNTIME_VERSIONS:
        known = ", ".join(RUNTIME_VERSIONS)
        raise SpecError([Mistake("", "place.machine", job.machine.name, "its hosts' system is not known",
                                 f"use a TPU of {known}")])
    return RUNTIME_VERSIONS[generation]


def packages(wheels: str) -> list[str]:
    """Return what pip installs; `wheels` is the folder with Embark's wheel."""
    return [JAX, wheel_requirement(wheels, "tpu,cloud,columns,tensorboard")]


def train_words() -> list[str]:
    """Return the command of each host; JAX finds the chips and the other hosts."""
    return [f"{VENV}/bin/python", "-m", "embark", "train", SPEC_PATH, "--set", "place.device=tpu"]


def environment(job: Job) -> dict[str, str]:
    """Return settings without those of NCCL and torch, which a TPU does not have."""
    own = {one.name: one.value for one in settings_of(job, is_pod=False) if one.name.startswith(("EMBARK_", "PYTHON"))}
    return {"HOME": STATE, **own}


def create_words(job: Job, startup: str) -> Words:
    """Return the command that requests the slices, with the file that their hosts run when they start."""
    # gcloud takes a reservation that fits the slices; only its preview can be told which.
    project = job.reservation[0] if job.has_reservation else ""
    options = {"tpu_nodes": job.num_nodes > 1, "tpu_node": job.num_nodes == 1, "tpu_spot": job.is_spot,
               "tpu_reserved": job.has_reservation, "tpu_shared": project, "project": True}
    return job_words(job, "tpu_create", options, host_project=project,
                     startup=Shell(f"--metadata-from-file=startup-script={quote(startup)}"))


def node_names(job: Job) -> list[str]:
    """Return the names of the slices."""
    return [f"{job.name}-{index}" for index in range(job.num_nodes)] if job.num_nodes > 1 else [job.name]
