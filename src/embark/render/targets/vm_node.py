"""A plain machine of a run: what it is given at its first start, and the service that trains on it, on any cloud."""

import re

from embark.errors import Mistake, SpecError
from embark.render.command import SPEC_PATH, meeting_conf, meeting_options, one_machine, ranks_words
from embark.render.folder import File
from embark.render.job import EXITS, Job, Setting
from embark.render.pod import config_data, storage_settings
from embark.render.settings import grace_s, settings_of
from embark.render.shell_text import Shell, job_text, option, quote
from embark.render.wheel import WHEELS, fetch_text, wheel_requirement

ACR = re.compile(r"(?P<registry>[a-z0-9]+)\.azurecr\.io/")
TOKEN = ("http://169.254.169.254/metadata/identity/oauth2/token?api-version=2018-02-01"
         "&resource=https%3A%2F%2Fmanagement.azure.com%2F")
ECR = re.compile(r"(?P<account>\d{12})\.dkr\.ecr\.(?P<region>[a-z0-9-]+)\.amazonaws\.com/(?P<name>[^:@]+)")
FOLDER = "/etc/embark"
STATE = "/var/lib/embark"
VENV = "/opt/embark"
FINAL_CODES = " ".join(str(int(row.code)) for row in EXITS if not row.must_retry)
"""Exit codes after which a restart would change nothing."""
NODE_PROGRAM = "/usr/local/bin/embark-node"
SETUP_PROGRAM = "/usr/local/bin/embark-setup"
OFF_PROGRAM = "/usr/local/bin/embark-off"
OFF_DELAY_S = 1800  # Half an hour to read the logs, without paying all night.


def cloud_init(job: Job, find_rank: str) -> File:
    """Write `cloud_init.yaml`. `find_rank` is shell text that sets RANK, this machine's number, and MASTER, the name or
    address of number 0."""
    service = job_text("embark.service.j2", job, program=NODE_PROGRAM, grace_s=grace_s(job), final_codes=FINAL_CODES)
    files = [*((f"{FOLDER}/{name}", "0644", text) for name, text in config_data(job).items()),
             (SETUP_PROGRAM, "0755", setup_program(job)), (NODE_PROGRAM, "0755", node_program(job, find_rank)),
             ("/etc/systemd/system/embark.service", "0644", service), (OFF_PROGRAM, "0755", off_program(job)),
             ("/etc/systemd/system/embark-off.service", "0644", off_unit(job))]
    return File("cloud_init.yaml", job_text("cloud_init.yaml.j2", job, files=files, setup_program=SETUP_PROGRAM))


def setup_program(job: Job, wheels: str = "") -> str:
    """Return a program that installs the image if the spec names one, else the pinned packages.

    Embark's wheel is in the folder `wheels`; without one it is fetched from the run's bucket.
    """
    from embark.stack.versions import default_triple

    packages = [*(words[1:] for words in default_triple().pip_arguments("cuda")),
                [wheel_requirement(wheels or WHEELS, "cloud,columns,tensorboard")]]
    fetch_wheel = "" if wheels or job.place.image else fetch_text(job)
    return job_text("vm_setup.sh.j2", job, state=STATE, venv=VENV, pip_arguments=packages, fetch_wheel=fetch_wheel,
                    ecr=ECR.match(job.image), is_acr=ACR.match(job.image), token_url=TOKEN)


def node_program(job: Job, find_rank: str) -> str:
    """Return a program that finds this machine's rank and becomes its processes."""
    if job.num_nodes == 1:
        words: list[str] = list(one_machine(job, SPEC_PATH))
    else:
        # The machine's number is known only where it runs.
        meeting = [Shell(f'"{word}"') if "$MASTER" in word else word for word in meeting_options(job, "$MASTER")]
        words = ranks_words(*meeting, Shell(f'"{meeting_conf("$IS_HOST")}"'), spec_path=SPEC_PATH)
    if job.place.image:
        words = [*_docker(job), job.image, *words]
    else:
        words[0] = f"{VENV}/bin/python"
    return job_text("vm_node.sh.j2", job, state=STATE, find_rank=find_rank.rstrip("\n"), settings=_settings(job),
                    words=words)


def off_program(job: Job) -> str:
    """Return a program that ends the machine on which it runs, so that it costs nothing but its disk."""
    return job_text("vm_off.sh.j2", job, token_url=TOKEN)


def off_unit(job: Job) -> str:
    """Return the service that runs `off_program` some time after the run has ended."""
    return job_text("embark_off.service.j2", job, program=OFF_PROGRAM, off_delay_s=OFF_DELAY_S)


def find_by_name(job: Job) -> str:
    """Shell text for clouds whose machines resolve one another's names, which end in their number."""
    return f'RANK=${{HOSTNAME##*-}}\nMASTER={quote(f"{job.name}-0")}\n'


def about_machines(job: Job) -> str:
    location = job.location
    where = location.region if job.cloud == "azure" else location.zone
    return (f"{job.num_nodes} x {location.machine_type} in {where}, without Kubernetes. vm.sh up starts the machines "
            "that do not exist, vm.sh status lists them, vm.sh logs N shows machine N, vm.sh down deletes all. Half an "
            "hour after the run has ended or failed, the machines end by themselves unless up --keep started them.")


def refuse_volume(job: Job) -> None:
    """Refuse a volume: plain machines read object stores, and have disks of their own."""
    if job.place.volume:
        raise SpecError([Mistake("", "place.volume", job.place.volume,
                                 f'is mounted into pods, and place.target is "{job.target}"',
                                 'leave it out and read the data from a bucket, or set place.target = "job"')])


def _settings(job: Job) -> list[Setting]:
    return [*settings_of(job, is_pod=False), *storage_settings(job)]


def _docker(job: Job) -> list[str]:
    words = (f"docker run --rm --name embark --gpus all --network host --ipc host --ulimit memlock=-1 "
             f"--ulimit nofile=1048576 --stop-timeout {grace_s(job)} --volume {FOLDER}:{FOLDER}:ro "
             f"--volume {STATE}:/scratch --workdir /scratch --env HOME=/scratch").split()
    if job.location.has_fabric and job.num_nodes > 1:
        words.append(option("--device", "/dev/infiniband"))
    for setting in _settings(job):
        words += ["--env", setting.name]
    return words


def acr_name(image: str) -> str:
    """Return the name of the Azure registry that has an image; empty if another cloud has it."""
    found = ACR.match(image)
    return found["registry"] if found else ""
