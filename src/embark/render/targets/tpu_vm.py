"""A slice of TPUs: a script that asks for it, follows it and gives it back, and what each of its hosts runs."""

from __future__ import annotations

from embark.errors import Mistake, SpecError
from embark.render.clouds.gcp.cluster import project_setting
from embark.render.command import SPEC_PATH
from embark.render.file import File
from embark.render.job import EXITS, Job
from embark.render.location import site_of
from embark.render.settings import grace_s, settings_of
from embark.render.shell_text import (
    PRELUDE,
    Shell,
    command,
    function,
    option,
    output_of,
    quote,
    run,
    script,
    setting,
    unless,
    variable,
    verbs,
)
from embark.render.steps import Words
from embark.render.targets.vm_node import LOG, STATE, USAGE, VENV

RUNTIME_VERSIONS = {
    "v2": "tpu-ubuntu2204-base",
    "v3": "tpu-ubuntu2204-base",
    "v4": "tpu-ubuntu2204-base",
    "v5litepod": "v2-alpha-tpuv5-lite",
    "v5p": "v2-alpha-tpuv5",
    "v6e": "v2-alpha-tpuv6e",
}
"""The system of each generation's hosts. It holds no framework: that comes with the stack."""
_PROJECT = option("--project", variable("PROJECT"))
_ZONE = option("--zone", variable("ZONE"))
JAX = "jax[tpu]==0.10.2"


def render_tpu_vm(job: Job) -> list[File]:
    """`tpu_vm.sh`, and `tpu_node.sh` which every host of the slice runs when it starts."""
    return [
        File("tpu_vm.sh", _script(job), is_executable=True),
        File("tpu_node.sh", node_script(job), is_executable=True),
    ]


def runtime_version(job: Job) -> str:
    generation = job.machine.name.rpartition("-")[0]
    if generation not in RUNTIME_VERSIONS:
        known = ", ".join(RUNTIME_VERSIONS)
        raise SpecError([Mistake("", "place.machine", job.machine.name, "its hosts' system is not known",
                                 f"use a TPU of {known}")])
    return RUNTIME_VERSIONS[generation]


def node_script(job: Job) -> str:
    """For the metadata key `startup-script`: root runs it on every host at every start."""
    final = " ".join(str(int(exit.code)) for exit in EXITS if not exit.must_retry)
    return script(
        f"What every host of the slice runs when it starts: one process for its {job.machine.gpus_per_host} chips. "
        "The hosts find one another by the slice's own network.",
        *setup_parts(job),
        "# A service of its own: it outlives this script, and starts again where that helps.\n"
        + command("systemd-run", "--unit=embark", f"--working-directory={STATE}",
                  *(option("--setenv", f"{name}={value}") for name, value in environment(job).items()),
                  "--property=Restart=on-failure", "--property=RestartSec=15",
                  option("--property", f"RestartPreventExitStatus={final}"),
                  f"--property=TimeoutStopSec={grace_s(job)}", f"--property=StandardOutput=append:{LOG}",
                  f"--property=StandardError=append:{LOG}", *train_words()),
    )


def setup_parts(job: Job) -> list[str]:
    """The spec, and the stack where it is not there yet."""
    return [
        f"mkdir -p {SPEC_PATH.rpartition('/')[0]} {STATE}\nprintf '%s' {quote(job.spec_toml)} >{SPEC_PATH}",
        unless(f"{VENV}/bin/python -c 'import embark, jax'",
               "apt-get update && apt-get install -y python3.11 python3.11-venv",
               f"python3.11 -m venv {VENV}",
               command(f"{VENV}/bin/pip", "install", "--no-cache-dir", *packages())),
    ]


def packages() -> list[str]:
    """By the names pip takes."""
    from embark import __version__

    return [JAX, f"embark-rec[tpu,cloud,columns,tensorboard]=={__version__}"]


def train_words() -> list[str]:
    """What each host runs; JAX finds the chips and the other hosts."""
    return [f"{VENV}/bin/python", "-m", "embark", "train", SPEC_PATH, "--set", "place.device=tpu"]


def environment(job: Job) -> dict[str, str]:
    """None of NCCL's and torch's: neither is there."""
    own = {one.name: one.value for one in settings_of(job, is_pod=False) if one.name.startswith(("EMBARK_", "PYTHON"))}
    return {"HOME": STATE, **own}


def create_words(job: Job, startup: str) -> Words:
    """The request, with the file that its hosts run at their start."""
    words: list[str] = [
        "gcloud", "compute", "tpus", "queued-resources", "create", job.name, _ZONE,
        f"--accelerator-type={job.machine.name}", option("--runtime-version", variable("RUNTIME_VERSION")),
        f"--metadata-from-file=startup-script={startup}", "--scopes=https://www.googleapis.com/auth/cloud-platform",
    ]
    words += ([f"--node-count={job.num_nodes}", f"--node-prefix={job.name}"] if job.num_nodes > 1
              else [f"--node-id={job.name}"])
    if job.spec.place.spot:
        words.append("--spot")
    return (*words, _PROJECT)


def enable_words() -> Words:
    return ("gcloud", "services", "enable", "tpu.googleapis.com", _PROJECT)


def describe_words(job: Job) -> Words:
    return ("gcloud", "compute", "tpus", "queued-resources", "describe", job.name, _ZONE, _PROJECT)


def end_words(job: Job) -> Words:
    return ("gcloud", "compute", "tpus", "queued-resources", "delete", job.name, _ZONE, "--force", "--quiet", _PROJECT)


def ssh_words(node: str, worker: str) -> Words:
    """Without its last word, `--command=…`."""
    return ("gcloud", "compute", "tpus", "tpu-vm", "ssh", node, _ZONE, worker, _PROJECT)


def node_names(job: Job) -> list[str]:
    """Of the slices."""
    return [f"{job.name}-{index}" for index in range(job.num_nodes)] if job.num_nodes > 1 else [job.name]


def _script(job: Job) -> str:
    site = site_of(job)
    name = job.name
    about = (f"A {job.machine.name} of Google Cloud: {job.machine.num_gpus} chips on {job.machine.num_hosts} hosts. "
             "tpu_vm.sh up asks for it and waits, status shows it, logs N follows host N, down gives it back.")
    there = command(*describe_words(job))
    state = output_of(*describe_words(job), option("--format", "value(state.state)"))
    node = Shell(f'"{name}-${{2:-0}}"') if job.num_nodes > 1 else name
    follow = command(*ssh_words(node, Shell('--worker="${1:-0}"')),
                     option("--command", f"sudo tail --follow=name --lines=100 {LOG}"))
    return script(
        about,
        "\n".join([project_setting(job), setting("ZONE", site.zone),
                   setting("RUNTIME_VERSION", runtime_version(job))]),
        PRELUDE, 'cd "$(dirname "$0")"',
        function("up", "A queued request: it is granted when there is room, and taken back with its machines.",
                 run(*enable_words()),
                 unless(there, run(*create_words(job, "tpu_node.sh"))),
                 f"""\
local state=DRY_RUN
if [ "$DRY_RUN" = 1 ]; then return 0; fi
until [ "$state" = ACTIVE ]; do
  state={state}
  case $state in
    FAILED | SUSPENDED) printf 'the request is %s\\n' "$state" >&2; exit 70 ;;
  esac
  sleep 20
done"""),
        function("status", "What has become of the request.", there),
        function("logs", "What one host says.", follow),
        function("down", "Gives the chips back; the run's files stay in its bucket.", run(*end_words(job))),
        verbs("up", "status", "logs", "down", usage=USAGE),
    )
