"""Plain Compute Engine machines: a script that starts, follows and ends them, and what each is given."""

from collections.abc import Sequence

from embark.render.file import File
from embark.render.job import Job
from embark.render.location import Location, location_of
from embark.render.scripts import script_file
from embark.render.shell_text import Shell, option, variable
from embark.render.steps import Step, Words
from embark.render.targets.vm_node import about_machines, cloud_init, find_by_name, refuse_volume

IMAGE_FAMILY, IMAGE_PROJECT = "common-cu129-ubuntu-2204-nvidia-580", "deeplearning-platform-release"
BUILT_IN = ("a2-", "a3-", "a4", "g2-", "g4-")
"""Families whose machines have their GPUs; to others they are attached."""


def render_vm(job: Job) -> list[File]:
    """`vm.sh` and `cloud_init.yaml`."""
    refuse_volume(job)
    words = start_words(job, location_of(job), ["--metadata-from-file=user-data=cloud_init.yaml"])
    return [
        script_file("vm.sh", "gcp/vm.sh.j2", job, about=about_machines(job), image_family=IMAGE_FAMILY,
                    image_project=IMAGE_PROJECT, steps=network_steps(job), start_words=words,
                    again_words=again_words(job), end_words=end_words(job)),
        cloud_init(job, find_by_name(job)),
    ]


_PROJECT = option("--project", variable("PROJECT"))
_ZONE = option("--zone", variable("ZONE"))


def network_steps(job: Job) -> list[Step]:
    """What the machines stand in."""
    name = f"embark-{job.name}"
    rule = Step("the firewall rule of its machines",
                (("gcloud", "compute", "firewall-rules", "create", name, option("--network", variable("NETWORK")),
                  "--allow=tcp,udp,icmp", f"--source-tags={name}", f"--target-tags={name}", _PROJECT),),
                unless=("gcloud", "compute", "firewall-rules", "describe", name, _PROJECT),
                remove=(("gcloud", "compute", "firewall-rules", "delete", name, "--quiet", _PROJECT),))
    if job.num_nodes == 1:
        return [rule]
    region = Shell('--region="${ZONE%-*}"')
    return [rule, Step(
        "the placement policy of its machines",
        (("gcloud", "compute", "resource-policies", "create", "group-placement", name, region,
          "--collocation=collocated", _PROJECT),),
        unless=("gcloud", "compute", "resource-policies", "describe", name, region, _PROJECT),
        remove=(("gcloud", "compute", "resource-policies", "delete", name, region, "--quiet", _PROJECT),))]


def start_words(job: Job, location: Location, given: Sequence[str]) -> Words:
    """One machine, number `$rank`. `given` says who may log in and what it does at its first start."""
    words: list[str] = [
        "gcloud", "compute", "instances", "create", Shell(f'"{job.name}-$rank"'), _ZONE,
        f"--machine-type={location.machine_type}", "--maintenance-policy=TERMINATE",
        option("--image-family", variable("IMAGE_FAMILY")), option("--image-project", variable("IMAGE_PROJECT")),
        "--boot-disk-size=200GB", "--boot-disk-type=hyperdisk-balanced" if location.machine_type.startswith("a4")
        else "--boot-disk-type=pd-balanced",
        Shell('--network-interface="network=$NETWORK,nic-type=GVNIC"'),
        *given, "--scopes=cloud-platform",
        f"--labels=embark-run={job.name}", f"--tags=embark-{job.name}",
    ]
    if not location.machine_type.startswith(BUILT_IN):
        words.append(f"--accelerator=type={job.machine.gke_accelerator},count={job.machine.num_gpus}")
    if job.spec.place.spot:
        words += ["--provisioning-model=SPOT", "--instance-termination-action=STOP"]
    if job.num_nodes > 1:
        words.append(f"--resource-policies=embark-{job.name}")
    return (*words, _PROJECT)


def again_words(job: Job) -> Words:
    """Starts a machine that was taken back and stopped."""
    return ("gcloud", "compute", "instances", "start", Shell(f'"{job.name}-$rank"'), _ZONE, _PROJECT)


def end_words(job: Job) -> Words:
    return ("gcloud", "compute", "instances", "delete", Shell(f'"{job.name}-$rank"'), _ZONE, "--quiet", _PROJECT)
