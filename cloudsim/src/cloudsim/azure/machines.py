"""`az vm`: plain machines and the log of their first start."""

import re
from pathlib import Path
from typing import Any

import yaml

from cloudsim.azure.arm import VM, Subscription, identifier, names_of
from cloudsim.azure.cluster_cloud import ACCOUNT_VARIABLE, blob_error
from cloudsim.azure.facts import FACTS
from cloudsim.azure.networks import NSG, PPG, SUBNET, VNET, add_subnet
from cloudsim.azure.storage import HOST, pull_error
from cloudsim.grammar import ParsedCommand
from cloudsim.state import Refusal, Resource
from embark.spec.load import parse_spec

SET = "Microsoft.Compute/availabilitySets"
ADDRESS = "Microsoft.Network/publicIPAddresses"
SPEC_NAME = "spec.toml"


def create_set(azure: Subscription, command: ParsedCommand) -> Any:
    group, name = names_of(command)
    azure.group(group)
    ppg = [azure.need(PPG, group, command.text("--ppg"))] if command["--ppg"] else []
    return azure.view(azure.find(SET, group, name) or azure.create(
        command, SET, group, name, location=azure.location(command, group), uses=ppg))


def create(azure: Subscription, command: ParsedCommand) -> Any:
    group, name = names_of(command)
    azure.group(group)
    location = azure.location(command, group)
    if azure.find(VM, group, name) is not None:
        raise Refusal(f"(PropertyChangeNotAllowed) The machine {name} exists, and its customData cannot be changed.")
    kind = azure.machine_type(command.text("--size", "Standard_D2s_v5"), location)
    if command.text("--image") not in FACTS["images"]["names"]:
        raise Refusal(f"Invalid image \"{command.text('--image')}\". Use a valid image URN, custom image name, or pick "
                      f"one of {', '.join(FACTS['images']['names'])}.")
    _check_keys(command)
    is_spot = command.text("--priority", "Regular").lower() == "spot"
    if command["--availability-set"] and (is_spot or command["--zone"]):
        raise Refusal("(OperationNotAllowed) A machine of an availability set can be neither in a zone nor a Spot one.")
    if not is_spot and (command["--max-price"] or command["--eviction-policy"]):
        raise Refusal("(InvalidParameter) Max price and eviction policy need --priority Spot.")
    uses = []
    for flag, what in (("--availability-set", SET), ("--ppg", PPG), ("--nsg", NSG)):
        if command[flag]:
            text = command.text(flag)
            uses.append(azure.need_id(text, what) if text.startswith("/") else azure.need(what, group, text))
    error = azure.quota_error(kind, location, 1, is_spot=is_spot)
    if error:
        raise Refusal(error.replace("(ErrCode_InsufficientVCPUQuota) Insufficient vcpu quota",
                                    "(QuotaExceeded) Operation could not be completed as it results in exceeding "
                                    "approved quota:"))
    uses.append(_subnet(azure, command, group, name, location))
    has_identity = command["--assign-identity"] is not None
    address = azure.create(command, ADDRESS, group, f"{name}PublicIP", location=location, takes_s=0.0, is_paid=True,
                           sku={"name": command.text("--public-ip-sku", "Standard")})
    made = azure.create(
        command, VM, group, name, location=location, takes_s=90.0, uses=[*uses, address], is_paid=True,
        hardwareProfile={"vmSize": kind.name}, priority="Spot" if is_spot else "Regular",
        vmId=identifier("vm", group, name), customData=_custom_data(command), tags=_tags(command),
        identity={"type": "SystemAssigned", "principalId": identifier("vm principal", group, name)} if has_identity
        else None, powerState="VM running", publicIps=f"20.0.0.{len(azure.resources.of_kind(VM)) + 1}")
    return azure.view(made)


def _check_keys(command: ParsedCommand) -> None:
    for one in command["--ssh-key-values"] or []:
        if not one.startswith("ssh-") and not (command.call.folder / one).is_file():
            raise Refusal(f"An RSA key file or key value must be supplied to SSH Key Value: {one} is neither.")
    if not command["--generate-ssh-keys"] and not command["--ssh-key-values"] and not command["--admin-password"]:
        raise Refusal("An SSH key is needed: --generate-ssh-keys or --ssh-key-values.")


def _subnet(azure: Subscription, command: ParsedCommand, group: str, name: str, location: str) -> Resource:
    """Return the subnet that is named; without a name az creates a network for the machine."""
    network, subnet = command.text("--vnet-name", f"{name}VNET"), command.text("--subnet", f"{name}Subnet")
    found = azure.find(VNET, group, network)
    if found is None:
        found = azure.create(command, VNET, group, network, location=location,
                             addressSpace={"addressPrefixes": ["10.0.0.0/16"]})
        return add_subnet(azure, command, found, subnet, "10.0.0.0/24", [])
    if azure.find(SUBNET, group, network, subnet) is None:
        raise Refusal(f"Subnet '{subnet}' does not exist in the virtual network '{network}'.")
    return azure.need(SUBNET, group, network, subnet)


def _custom_data(command: ParsedCommand) -> str:
    """Return a file's content, or the text itself if there is no such file."""
    text = command.text("--custom-data")
    path = command.call.folder / text
    return path.read_text(encoding="utf-8") if text and path.is_file() else text


def _tags(command: ParsedCommand) -> dict[str, str]:
    return dict(one.partition("=")[::2] for one in command["--tags"] or [])


def list_machines(azure: Subscription, command: ParsedCommand) -> Any:
    group = command.text("--resource-group")
    if group:
        azure.group(group)
    return [azure.view(one) for one in azure.resources.of_kind(VM) if one.name.startswith(f"{group}/" if group else "")]


def delete(azure: Subscription, command: ParsedCommand) -> Any:
    if not command["--yes"]:
        raise Refusal("Unable to prompt for confirmation as no tty available. Use --yes.")
    azure.delete(command, azure.need(VM, *names_of(command)))


def start(azure: Subscription, command: ParsedCommand) -> Any:
    azure.need(VM, *names_of(command))
    azure.clock.advance(60.0)


def run_command(azure: Subscription, command: ParsedCommand) -> Any:
    machine = azure.need(VM, *names_of(command))
    script = " ".join(command["--scripts"] or [])
    if "ssh_host_ed25519_key.pub" in script:
        said = f"ssh-ed25519 {identifier('host key', machine.name).replace('-', '')}"
    elif script.startswith("tail"):
        said = machine_log(azure, machine)
    else:
        said = ""
    message = f"Enable succeeded: \n[stdout]\n{said}\n\n[stderr]\n"
    return {"value": [{"code": "ProvisioningState/succeeded", "level": "Info", "message": message}]}


def machine_log(azure: Subscription, machine: Resource) -> str:
    """Return what a machine would write: why the run does not start there, or that it does."""
    body = machine.attributes["body"]
    try:
        raw = yaml.safe_load(body["customData"])
    except yaml.YAMLError:
        raw = None
    if not isinstance(raw, dict) or not body["customData"].startswith("#cloud-config"):
        return "tail: cannot open '/var/log/embark.log' for reading: No such file or directory"
    files = {Path(row["path"]).name: str(row["content"]) for row in raw.get("write_files") or ()}
    principal = (body["identity"] or {}).get("principalId", "")
    setup, node = files.get("embark-setup", ""), files.get("embark-node", "")
    image = re.search(r"docker pull (\S+)", setup)
    if image is not None:
        host = image[1].partition("/")[0]
        has_login = re.search(rf"docker login\b.*{re.escape(host)}|{re.escape(host)}.*\bdocker login", setup, re.DOTALL)
        is_custom = host.endswith(HOST)
        error = pull_error(azure, image[1], principal if has_login or not is_custom else "")
        if error:
            return f"docker: Error response from daemon: {error}"
    spec = parse_spec(files.get(SPEC_NAME, ""))
    if spec is None:
        return f"{SPEC_NAME}: no spec"
    found = re.search(rf"{ACCOUNT_VARIABLE}=['\"]?([a-z0-9]+)", node)
    for uri, write in ((str(spec.data.path), False), (str(spec.store.root), True)):
        if uri.startswith("az://"):
            error = blob_error(azure, found[1], uri[5:].partition("/")[0], principal, write=write) if found else \
                f"Account must be specified: set {ACCOUNT_VARIABLE}"
            if error:
                return f"{uri}: {error}"
    return f"rank {machine.name.rpartition('-')[2]}: the image is there, {spec.store.root} can be written: training"
