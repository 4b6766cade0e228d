"""The command that starts one machine's ranks, for each way they find the others."""

import base64
import shlex

from .job import MAX_RESTARTS, PORT, Job
from .settings import fabric_needs

SPEC_PATH = "/etc/embark/spec.toml"
SPEC_VARIABLE = "EMBARK_SPEC_BASE64"
WRITTEN_SPEC_PATH = "/tmp/embark-spec.toml"
WRITE_SPEC = f'printf %s "${SPEC_VARIABLE}" | base64 -d > {WRITTEN_SPEC_PATH}'
"""Shell text. Base64 has no character that a shell, YAML or a scheduler's macros would read."""
WAIT_S = 1800  # The last machine may be bought just now, and pulls its image many minutes after the first.
IS_HOST = '$([ "$JOB_COMPLETION_INDEX" = 0 ] && echo true || echo false)'
"""Shell text: the pod with index 0 keeps the store where the others meet."""


def train_words(spec_path: str = SPEC_PATH) -> list[str]:
    """Return the command of each rank."""
    return ["-m", "embark", "train", spec_path]


def ranks_words(*options: str, spec_path: str = SPEC_PATH) -> list[str]:
    """torchrun by way of `embark.torchrun`, which ends with the exit code of its ranks."""
    return ["python", "-m", "embark.torchrun", *options, *train_words(spec_path)]


def ranks_line(words: list[str], *options: str) -> str:
    """Return the words quoted for a shell, with more of torchrun's options, which the shell expands."""
    quoted = [shlex.quote(word) for word in words]
    at = words.index("-m", 3)  # the ranks' own -m
    return " ".join([*quoted[:at], *options, *quoted[at:]])


def one_machine(job: Job, spec_path: str = SPEC_PATH) -> list[str]:
    return ranks_words("--standalone", f"--nproc-per-node={job.num_processes}", f"--max-restarts={MAX_RESTARTS}",
                       spec_path=spec_path)


def meeting_options(job: Job, endpoint: str, port: int | str = PORT) -> list[str]:
    """torchrun's options, except `--rdzv-conf`, which differs between the machines."""
    return [f"--nnodes={job.nnodes}", f"--nproc-per-node={job.num_processes}", f"--max-restarts={job.max_restarts}",
            f"--rdzv-id={job.name}", "--rdzv-backend=c10d", f"--rdzv-endpoint={endpoint}:{port}"]


def meeting_conf(is_host: str) -> str:
    return f"--rdzv-conf=is_host={is_host},join_timeout={WAIT_S},read_timeout={WAIT_S}"


def indexed_command(job: Job, host: str) -> list[str]:
    """Return the command of the pods of an indexed Job; `host` is the name of the pod with index 0."""
    if job.is_tpu:  # one process for all chips of a host, and GKE says where the others are
        return ["python", *train_words(), "--set", "place.device=tpu"]
    if job.num_nodes == 1:
        return one_machine(job)
    # Only a running pod knows whether it is the host, so a shell asks.
    line = ranks_line(ranks_words(*meeting_options(job, host)), meeting_conf(IS_HOST))
    return shell_command(f"exec {line}", fabric_needs(job).env_script)


def shell_command(line: str, env_script: str) -> list[str]:
    """Return a command that runs a shell line, after the script that the fabric's plugin brings."""
    if not env_script:
        return ["/bin/sh", "-c", line]
    # Google's scripts are written for bash.
    return ["/bin/bash", "-c", f"set -e; . {shlex.quote(env_script)}; {line}"]


def plain_command(job: Job, words: list[str]) -> list[str]:
    """Return the words, or a shell that runs them if the fabric has a script to read first."""
    script = fabric_needs(job).env_script
    return shell_command("exec " + shlex.join(words), script) if script else words


def encoded_spec(job: Job) -> str:
    """Return the spec for a variable of a container into which no file can be mounted."""
    return base64.b64encode(job.spec_toml.encode()).decode()
