"""Plain Compute Engine machines: a script that starts, follows and ends them, and what each is given."""

from __future__ import annotations

from collections.abc import Sequence

from embark.render.clouds.gcp.cluster import project_setting
from embark.render.file import File
from embark.render.job import Job
from embark.render.location import Site, site_of
from embark.render.shell_text import (
    PRELUDE,
    Shell,
    command,
    function,
    option,
    run,
    script,
    setting,
    variable,
    verbs,
)
from embark.render.steps import Step, Words, step_text
from embark.render.targets.vm_node import LOG, USAGE, cloud_init, find_by_name, refuse_volume

IMAGE_FAMILY, IMAGE_PROJECT = "common-cu129-ubuntu-2204-nvidia-580", "deeplearning-platform-release"
BUILT_IN = ("a2-", "a3-", "a4", "g2-", "g4-")
"""Families whose machines have their GPUs; to others they are attached."""


def render_vm(job: Job) -> list[File]:
    """`vm.sh` and `cloud_init.yaml`."""
    refuse_volume(job)
    return [File("vm.sh", _script(job), is_executable=True), cloud_init(job, find_by_name(job))]


def _script(job: Job) -> str:
    site = site_of(job)
    about = (f"{job.num_nodes} x {site.machine_type} in {site.zone}, without Kubernetes. vm.sh up starts those that "
             "are not there, vm.sh status lists them, vm.sh logs N shows machine N, vm.sh down ends all.")
    notes = ""
    if site.has_fabric and job.num_nodes > 1:
        notes = (f"# Here NCCL goes over the first network card alone. {job.machine.fabric.title} needs a daemon or\n"
                 "# networks beside each machine: for that, render with place.target = \"job\" and use GKE.")
    settings = [project_setting(job), setting("ZONE", site.zone), setting("NETWORK", "default"),
                setting("IMAGE_FAMILY", IMAGE_FAMILY, "With NVIDIA's driver and Docker: gcloud compute images list "
                                                      f"--project={IMAGE_PROJECT}"),
                setting("IMAGE_PROJECT", IMAGE_PROJECT)]
    return script(
        about, "\n".join(settings), notes, PRELUDE, 'cd "$(dirname "$0")"',
        function("up", "Starts the machines that are not there.", _up(job, site)),
        *_followed(job),
    )


_PROJECT = option("--project", variable("PROJECT"))
_ZONE = option("--zone", variable("ZONE"))


def around_steps(job: Job) -> list[Step]:
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


def start_words(job: Job, site: Site, given: Sequence[str]) -> Words:
    """One machine, number `$rank`. `given` says who may log in and what it does at its first start."""
    words: list[str] = [
        "gcloud", "compute", "instances", "create", Shell(f'"{job.name}-$rank"'), _ZONE,
        f"--machine-type={site.machine_type}", "--maintenance-policy=TERMINATE",
        option("--image-family", variable("IMAGE_FAMILY")), option("--image-project", variable("IMAGE_PROJECT")),
        "--boot-disk-size=200GB", "--boot-disk-type=hyperdisk-balanced" if site.machine_type.startswith("a4")
        else "--boot-disk-type=pd-balanced",
        Shell('--network-interface="network=$NETWORK,nic-type=GVNIC"'),
        *given, "--scopes=cloud-platform",
        f"--labels=embark-run={job.name}", f"--tags=embark-{job.name}",
    ]
    if not site.machine_type.startswith(BUILT_IN):
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


def _up(job: Job, site: Site) -> str:
    words = start_words(job, site, ["--metadata-from-file=user-data=cloud_init.yaml"])
    there = _gcloud("compute", "instances", "describe", Shell(f'"{job.name}-$rank"'), _ZONE)
    loop = f"""\
for rank in $(seq 0 {job.num_nodes - 1}); do
  if ! {there} >/dev/null 2>&1; then
{run(*words, indent="    ")}
  else
    # It may have been taken back and stopped; one that runs is left alone.
    {run(*again_words(job))}
  fi
done"""
    return "\n".join(["local rank", *(step_text(step) for step in around_steps(job)), loop])


def _followed(job: Job) -> list[str]:
    listing = _gcloud("compute", "instances", "list", f"--filter=labels.embark-run={job.name}")
    follow = _gcloud("compute", "ssh", Shell(f'"{job.name}-${{1:-0}}"'), option("--zone", variable("ZONE")),
                     option("--command", f"tail --follow=name --lines=100 {LOG}"))
    end = run(*end_words(job))
    return [
        function("status", "Which machines there are.", listing),
        function("logs", "What one machine says.", follow),
        function("down", "Ends all machines; the run's files stay in its bucket.", f"""\
local rank
for rank in $(seq 0 {job.num_nodes - 1}); do
  {end} || true
done"""),
        verbs("up", "status", "logs", "down", usage=USAGE),
    ]


def _gcloud(*words: str) -> str:
    return command("gcloud", *words, option("--project", variable("PROJECT")))
