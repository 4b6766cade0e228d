"""Plain Azure machines: a script that starts, follows and ends them, and what each is given."""

from __future__ import annotations

from embark.render.file import File
from embark.render.job import Job
from embark.render.shell_text import (
    PRELUDE,
    Shell,
    command,
    function,
    output_of,
    quote,
    run,
    script,
    setting,
    variable,
    verbs,
)
from embark.render.site import Site, buckets, site_of
from embark.render.vm_node import LOG, USAGE, cloud_init, find_by_name, refuse_volume
from embark.render.volumes_azure import storage_account_setting

IMAGE = "microsoft-dsvm:ubuntu-hpc:2204:latest"
"""Microsoft's image with NVIDIA's driver, InfiniBand's and Docker."""


def render_vm(job: Job) -> list[File]:
    """`vm.sh` and `cloud_init.yaml`."""
    refuse_volume(job)
    return [File("vm.sh", _script(job), is_executable=True), cloud_init(job, find_by_name(job))]


def _script(job: Job) -> str:
    site = site_of(job)
    about = (f"{job.num_nodes} x {site.machine_type} in {site.region}, without Kubernetes. vm.sh up starts those that "
             "are not there, vm.sh status lists them, vm.sh logs N shows machine N, vm.sh down ends all: a machine "
             "that is only shut down is still paid for.")
    notes = ""
    if site.has_fabric and job.num_nodes > 1 and job.spec.place.spot:
        notes = ("# Spot machines cannot be in an availability set, and without one there is no InfiniBand:\n"
                 "# NCCL uses Ethernet. For both, render with place.target = \"job\" and use AKS.")
    settings = [setting("RESOURCE_GROUP", f"embark-{job.name}"), setting("LOCATION", site.region),
                setting("VM_IMAGE", IMAGE)]
    if any(bucket.scheme == "az" for bucket in buckets(job)):
        settings.append(storage_account_setting(job))
    return script(
        about, "\n".join(settings), notes, PRELUDE, 'cd "$(dirname "$0")"',
        function("up", "Starts the machines that are not there.", _up(job, site)),
        *_followed(job),
    )


def _up(job: Job, site: Site) -> str:
    group = ("--resource-group", variable("RESOURCE_GROUP"))
    has_set = job.num_nodes > 1 and not job.spec.place.spot
    words: list[str] = [
        "az", "vm", "create", *group, "--name", Shell(f'"{job.name}-$rank"'), "--size", site.machine_type,
        "--image", variable("VM_IMAGE"), "--admin-username", "embark", "--generate-ssh-keys",
        "--custom-data", "cloud_init.yaml", "--os-disk-size-gb", "256", "--assign-identity", "[system]",
        "--vnet-name", "embark", "--subnet", "machines", "--nsg", "embark", "--public-ip-sku", "Standard",
        "--tags", f"embark-run={job.name}",
    ]
    steps = [
        run("az", "group", "create", "--name", variable("RESOURCE_GROUP"), "--location", variable("LOCATION")),
        run("az", "network", "vnet", "create", *group, "--name", "embark", "--subnet-name", "machines"),
        "# Machines of one network may talk; from outside nothing comes in. The public address is for their way out.",
        run("az", "network", "nsg", "create", *group, "--name", "embark"),
    ]
    if has_set:
        words += ["--availability-set", job.name, "--ppg", job.name]
        steps += [
            "# In one availability set the machines share an InfiniBand fabric; in one proximity group they are near.",
            run("az", "ppg", "create", *group, "--name", job.name, "--location", variable("LOCATION"),
                "--intent-vm-sizes", site.machine_type),
            run("az", "vm", "availability-set", "create", *group, "--name", job.name, "--ppg", job.name,
                "--platform-fault-domain-count", "1", "--platform-update-domain-count", "1"),
        ]
    if job.spec.place.spot:
        words += ["--priority", "Spot", "--eviction-policy", "Delete", "--max-price=-1"]
    there = command("az", "vm", "show", *group, "--name", Shell(f'"{job.name}-$rank"'))
    grants = _grants(job)
    loop = f"""\
for rank in $(seq 0 {job.num_nodes - 1}); do
  if ! {there} >/dev/null 2>&1; then
{run(*words, indent="    ")}{grants}
  fi
done"""
    return "\n".join(["local rank", *steps, loop])


def _grants(job: Job) -> str:
    """The machine's own identity may use the run's containers."""
    lines = []
    for bucket in buckets(job):
        if bucket.scheme != "az":
            continue
        principal = output_of("az", "vm", "show", "--resource-group", variable("RESOURCE_GROUP"), "--name",
                              Shell(f'"{job.name}-$rank"'), "--query", "identity.principalId", "--output", "tsv")
        account = output_of("az", "storage", "account", "show", "--name", variable("STORAGE_ACCOUNT"),
                            "--query", "id", "--output", "tsv")
        role = "Storage Blob Data Contributor" if bucket.is_written else "Storage Blob Data Reader"
        lines.append(run("az", "role", "assignment", "create", "--role", role, "--assignee-object-id", principal,
                         "--assignee-principal-type", "ServicePrincipal", "--scope",
                         Shell(f"{account}/blobServices/default/containers/{quote(bucket.name)}"), indent="    "))
    return "".join(f"\n{line}" for line in lines)


def _followed(job: Job) -> list[str]:
    group = ("--resource-group", variable("RESOURCE_GROUP"))
    listing = command("az", "vm", "list", *group, "--show-details", "--output", "table")
    follow = command("az", "vm", "run-command", "invoke", *group, "--name", Shell(f'"{job.name}-${{1:-0}}"'),
                     "--command-id", "RunShellScript", "--scripts", f"tail --lines=200 {LOG}",
                     "--query", "value[0].message", "--output", "tsv")
    end = run("az", "group", "delete", "--name", variable("RESOURCE_GROUP"), "--yes")
    return [
        function("status", "Which machines there are.", listing),
        function("logs", "What one machine said last.", follow),
        function("down", "All that was made for the run is in one group; its data is not.", end),
        verbs("up", "status", "logs", "down", usage=USAGE),
    ]
