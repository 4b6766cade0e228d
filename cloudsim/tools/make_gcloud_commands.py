"""Writes the stand-in's table of gcloud's commands from the Google Cloud CLI's own parsers.

    python cloudsim/tools/make_gcloud_commands.py SDK_FOLDER

SDK_FOLDER has `lib/gcloud.py` and `VERSION` (a Google Cloud CLI as installed). Nothing of it is copied but the names of
commands, positional arguments and flags, which flags are required, and the choices of a flag.
"""

import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

TABLE = Path(__file__).parents[1] / "src/cloudsim/commands/gcloud.toml"
HEAD = """# Commands of gcloud that scripts, guides and launches use. Written by
# cloudsim/tools/make_gcloud_commands.py from the parsers of the Google Cloud CLI (Apache-2.0); only names,
# requirements and choices are taken.
[program]
version = "{version}"
source = "https://cloud.google.com/sdk/gcloud/reference"
date = "2026-11"
unknown_flag = "ERROR: ({{command}}) unrecognized arguments: {{flag}}"
unknown_command = "ERROR: (gcloud) Invalid choice: '{{words}}'."
missing_flag = "ERROR: ({{command}}) argument {{flag}}: Must be specified."
usage_code = 2

[flags]
"--project" = "value"
"--format" = "value"
"--quiet" = "bool"
"--flatten" = "repeat"
"--verbosity" = "choice:debug|info|warning|error|critical|none"
"--account" = "value"
"--configuration" = "value"
"--billing-project" = "value"
"--impersonate-service-account" = "value"
"--log-http" = "bool"
"--trace-token" = "value"
"--user-output-enabled" = "bool"
"--access-token-file" = "value"
"--flags-file" = "value"
"--help" = "bool"

[aliases]
"-q" = "--quiet"
"-r" = "--recursive"
"-R" = "--recursive"
"""
COMMANDS = """
ai custom-jobs cancel, ai custom-jobs create, ai custom-jobs describe, ai custom-jobs list, ai custom-jobs stream-logs
ai endpoints create, ai endpoints delete, ai endpoints deploy-model, ai endpoints describe, ai endpoints list
ai endpoints predict, ai endpoints undeploy-model, ai endpoints update, ai models delete, ai models describe
ai models upload
alpha monitoring policies create, alpha monitoring policies delete, alpha monitoring policies list
artifacts docker images list, artifacts repositories add-iam-policy-binding, artifacts repositories create
artifacts repositories delete, artifacts repositories describe, artifacts repositories list
auth application-default login, auth configure-docker, auth list, auth login, auth print-access-token
beta monitoring channels create, beta monitoring channels delete, beta monitoring channels list
beta quotas info describe, beta quotas info list, billing budgets create, billing budgets delete, billing budgets list
billing projects describe, components install, config set, config get-value
compute addresses create, compute addresses delete, compute addresses describe
compute firewall-rules create, compute firewall-rules delete, compute firewall-rules describe
compute firewall-rules list, compute instances create, compute instances delete, compute instances describe
compute instances get-guest-attributes, compute instances get-serial-port-output, compute instances list
compute instances start, compute instances stop, compute machine-types list, compute networks create
compute networks delete, compute networks describe, compute networks list, compute networks subnets create
compute networks subnets delete, compute networks subnets describe, compute operations list
compute project-info describe, compute regions describe, compute resource-policies create group-placement
compute resource-policies delete, compute resource-policies describe, compute scp, compute ssh
compute start-iap-tunnel, compute tpus accelerator-types list, compute tpus queued-resources create
compute tpus queued-resources delete, compute tpus queued-resources describe, compute tpus queued-resources list
compute tpus tpu-vm delete, compute tpus tpu-vm describe, compute tpus tpu-vm list, compute tpus tpu-vm ssh
container clusters create, container clusters delete, container clusters describe
container clusters get-credentials, container clusters list, container clusters resize
container node-pools create, container node-pools delete, container node-pools describe
container node-pools list, container node-pools update
filestore instances create, filestore instances delete, filestore instances describe, filestore instances list
iam service-accounts add-iam-policy-binding, iam service-accounts create, iam service-accounts describe
lustre instances create, lustre instances delete, lustre instances describe, lustre instances list
projects add-iam-policy-binding, projects describe, projects list
run services delete, run services proxy, run services replace, run services update
run services update-traffic
services disable, services enable, services list, services vpc-peerings connect, services vpc-peerings list
storage buckets add-iam-policy-binding, storage buckets create, storage buckets delete, storage buckets describe
storage buckets list, storage buckets get-iam-policy, storage buckets remove-iam-policy-binding
storage cp, storage ls, storage rm, storage rsync
"""

IN_GROUPS = {
    "--accelerator-type", "--boot-disk-kms-key", "--custom-cpu", "--custom-memory", "--default-squash-mode",
    "--deletion-protection", "--dynamic-tier-options-mode", "--enable-autoprovisioning-autorepair",
    "--enable-autoprovisioning-autoupgrade", "--instance-kms-key", "--kms-key", "--maintenance-policy-weekly-windows",
    "--maintenance-window-recurrence", "--maintenance-window-start", "--max-accelerator", "--node-count", "--node-id",
    "--start-date", "--topology", "--type",
}
"""Required only where another flag of their group is given, by the reference pages."""
IN_GROUPS_OF = {"--network", "--region"}
"""The same, for the commands that reach a machine."""


def main(folder: Path) -> None:
    sys.path[:0] = [str(folder / "lib"), str(folder / "lib" / "third_party")]
    cli = importlib.import_module("googlecloudsdk.gcloud_main").CreateCLI([])
    lines = [HEAD.format(version=(folder / "VERSION").read_text().strip())]
    names = sorted(name.strip() for name in COMMANDS.replace("\n", ",").split(",") if name.strip())
    for name in names:
        element = cli._TopElement()
        for word in name.split():
            element = element.LoadSubElement(word)
            if element is None:
                raise SystemExit(f"gcloud {name}: no such command")
        lines.append(_section(name, element))
    TABLE.write_text("\n".join(lines), encoding="utf-8")


def _section(name: str, element: Any) -> str:
    flags, required = {}, []
    for flag in (*element.ai.flag_args, *_of_group(element)):
        long = [one for one in flag.option_strings if one.startswith("--") and one not in ("--help", "--document")]
        if not long or long[0].startswith("--no-"):
            continue
        for one in long:
            flags[one] = _kind(flag)
        is_in_group = long[0] in IN_GROUPS or (name.endswith(("scp", "ssh", "tunnel")) and long[0] in IN_GROUPS_OF)
        if flag.is_required and not is_in_group and long[0] != "--notification-channels":
            required.append(long[0])
    shown = ", ".join(f"{json.dumps(one)} = {json.dumps(kind)}" for one, kind in sorted(flags.items()))
    lines = [f'[commands."{name}"]', f"positionals = {json.dumps(_positionals(element))}",
             f"required = {json.dumps(sorted(set(required)))}", "flags = {" + shown + "}",
             f'source = "https://cloud.google.com/sdk/gcloud/reference/{name.replace(" ", "/")}"', ""]
    return "\n".join(lines)


def _of_group(element: Any) -> Iterator[Any]:
    """Return the flags of the location that all commands of a group have."""
    for flag in element.ai.ancestor_flag_args:
        if {"--location", "--region", "--zone"} & set(flag.option_strings):
            yield flag


def _positionals(element: Any) -> list[str]:
    found = []
    for one in element.ai.positional_args:
        if one.dest in ("ssh_args", "implementation_args"):
            continue
        name = str(one.metavar or one.dest).upper().replace("[", "").replace("]", "").split()[0]
        mark = "*" if one.nargs in ("*", "+") else "" if one.is_required else "?"
        found.append(name + mark)
        if mark == "*":  # Those that follow are the last of them.
            break
    return found


def _kind(flag: Any) -> str:
    kind = type(flag).__name__
    if flag.nargs == 0:
        return "bool"
    choices = flag.choices
    if choices and all(isinstance(one, str) for one in choices) and len(choices) < 80:
        return "choice:" + "|".join(sorted(choices))
    if "Append" in kind or getattr(flag, "nargs", None) == "append":
        return "repeat"
    return "value"


if __name__ == "__main__":
    main(Path(sys.argv[1]))
