"""A plain machine of a run: what it is given at its first start, and the service that trains on it, on any cloud."""

from __future__ import annotations

from typing import Any

from embark.errors import Mistake, SpecError
from embark.render.command import SPEC_PATH, meeting_conf, meeting_options, one_machine, ranks_words
from embark.render.file import File
from embark.render.job import EXITS, Job, Setting
from embark.render.location import site_of
from embark.render.pod import config_data, storage_settings
from embark.render.settings import grace_s, settings_of
from embark.render.shell_text import Shell, command, option, quote, script
from embark.render.yaml_text import note, yaml_text

FOLDER = "/etc/embark"
STATE = "/var/lib/embark"
LOG = "/var/log/embark.log"
VENV = "/opt/embark"
NODE_PROGRAM = "/usr/local/bin/embark-node"
SETUP_PROGRAM = "/usr/local/bin/embark-setup"
USAGE = "up | status | logs [NUMBER] | down"


def cloud_init(job: Job, find_place: str) -> File:
    """`cloud_init.yaml`. `find_place` is shell text that sets RANK, this machine's number, and MASTER, the name or
    address of number 0."""
    about = (f"What each of the {job.num_nodes} machines is given at its first start: the spec, and a service that "
             "trains it.")
    document: dict[str, Any] = {
        "write_files": [
            *(_file(f"{FOLDER}/{name}", text) for name, text in config_data(job).items()),
            _file(SETUP_PROGRAM, setup_program(job), mode="0755"),
            _file(NODE_PROGRAM, node_program(job, find_place), mode="0755"),
            _file("/etc/systemd/system/embark.service", service(job)),
        ],
        "runcmd": [
            note([SETUP_PROGRAM], "Once: the stack or the image, and the machine's own disks."),
            ["systemctl", "daemon-reload"],
            note(["systemctl", "enable", "--now", "embark.service"], "And again whenever the machine starts."),
        ],
    }
    return File("cloud_init.yaml", "#cloud-config\n" + yaml_text([document], about=about))


def setup_program(job: Job) -> str:
    """Installs what the ranks run in: the image where the spec names one, else the pinned packages."""
    parts = [f"mkdir -p {STATE}", _disks() if job.machine.local_disk_gb else "", f"chmod 1777 {STATE}"]
    parts.append(command("docker", "pull", job.image) if job.spec.place.image else _packages())
    parts.append("nvidia-smi --list-gpus")
    return script("Readies this machine for the run.", *parts)


def node_program(job: Job, find_place: str) -> str:
    """Finds this machine's place among the others and becomes its ranks."""
    exports = [f"export {s.name}={quote(s.value)}" for s in _settings(job)]
    if job.num_nodes == 1:
        words: list[str] = list(one_machine(job, SPEC_PATH))
        find_place = ""
    else:
        # The machine's number is known only where it runs.
        meeting = [Shell(f'"{word}"') if "$MASTER" in word else word for word in meeting_options(job, "$MASTER")]
        conf = Shell(f'"{meeting_conf("$IS_HOST")}"')
        find_place += '\nIS_HOST=false\nif [ "$RANK" = 0 ]; then IS_HOST=true; fi'
        words = ranks_words(*meeting, conf, spec_path=SPEC_PATH)
    if job.spec.place.image:
        words = [*_docker(job), job.image, *words]
    else:
        words[0] = f"{VENV}/bin/python"
    return script("Trains: this machine's ranks of the run.", find_place, "\n".join(exports),
                  f"cd {STATE}",
                  "docker rm --force embark >/dev/null 2>&1 || true" if job.spec.place.image else "",
                  "exec " + command(*words))


def service(job: Job) -> str:
    """A systemd unit that starts the ranks again as the exit codes say."""
    final = " ".join(str(int(exit.code)) for exit in EXITS if not exit.must_retry)
    return f"""\
[Unit]
Description=Embark run {job.name}
After=network-online.target docker.service
Wants=network-online.target

[Service]
Type=exec
ExecStart={NODE_PROGRAM}
Restart=on-failure
RestartSec=15
# The spec or the data is wrong: the same again.
RestartPreventExitStatus={final}
KillMode=mixed
TimeoutStopSec={grace_s(job)}
LimitMEMLOCK=infinity
LimitNOFILE=1048576
StandardOutput=append:{LOG}
StandardError=append:{LOG}

[Install]
WantedBy=multi-user.target
"""


def find_by_name(job: Job) -> str:
    """For clouds whose machines resolve one another's names, which end in their number."""
    return f'RANK=${{HOSTNAME##*-}}\nMASTER={quote(f"{job.name}-0")}'


def refuse_volume(job: Job) -> None:
    """Plain machines are given no file system: they read object stores, and have disks of their own."""
    if job.spec.place.volume:
        raise SpecError([Mistake("", "place.volume", job.spec.place.volume,
                                 f'is mounted into pods, and place.target is "{job.spec.place.target}"',
                                 'leave it out and read the data from a bucket, or set place.target = "job"')])


def _settings(job: Job) -> list[Setting]:
    return [*settings_of(job, is_pod=False), *(Setting(*row) for row in storage_settings(job))]


def _docker(job: Job) -> list[str]:
    words: list[str] = [
        "docker", "run", "--rm", "--name", "embark", "--gpus", "all", "--network", "host", "--ipc", "host",
        "--ulimit", "memlock=-1", "--ulimit", "nofile=1048576", "--stop-timeout", str(grace_s(job)),
        "--volume", f"{FOLDER}:{FOLDER}:ro", "--volume", f"{STATE}:/scratch", "--workdir", "/scratch",
        "--env", "HOME=/scratch",
    ]
    if site_of(job).has_fabric and job.num_nodes > 1:
        words.append(option("--device", "/dev/infiniband"))
    for setting in _settings(job):
        words += ["--env", setting.name]
    return words


def _packages() -> str:
    from embark import __version__
    from embark.stack.versions import default_triple

    pip = f"{VENV}/bin/pip"
    # The image's own Python may be older than the stack takes.
    lines = [
        "if ! python3 -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then",
        "  apt-get update && apt-get install -y python3.11 python3.11-venv",
        f"  python3.11 -m venv {VENV}",
        "else",
        "  apt-get update && apt-get install -y python3-venv",
        f"  python3 -m venv {VENV}",
        "fi",
    ]
    lines += [command(pip, "install", "--no-cache-dir", *words[1:]) for words in default_triple().pip_arguments("cuda")]
    lines.append(command(pip, "install", "--no-cache-dir", f"embark-rec[cloud,columns,tensorboard]=={__version__}"))
    return "\n".join(lines)


def _disks() -> str:
    return f"""\
# The machine's own disks as one: the data's cache, and files until they are uploaded.
mapfile -t DISKS < <(lsblk --nodeps --noheadings --paths --output NAME,MODEL |
  awk '/Instance Storage|nvme_card|NVMe Direct Disk/ {{ print $1 }}')
if [ "${{#DISKS[@]}}" -gt 1 ]; then
  mdadm --create /dev/md0 --run --level=0 --raid-devices="${{#DISKS[@]}}" "${{DISKS[@]}}"
  DISKS=(/dev/md0)
fi
if [ "${{#DISKS[@]}}" = 1 ]; then
  mkfs.ext4 -q -E nodiscard "${{DISKS[0]}}"
  mount -o noatime "${{DISKS[0]}}" {STATE}
fi"""


def _file(path: str, text: str, mode: str = "0644") -> dict[str, Any]:
    return {"path": path, "permissions": mode, "content": text}
