"""`helm`: repositories, and charts that install Deployments, DaemonSets and kinds in the current cluster."""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import yaml

from cloudsim.account import Account, AnsweredBy, Call
from cloudsim.grammar import ParsedCommand, load_grammar
from cloudsim.kubernetes.admission import install
from cloudsim.kubernetes.cluster import Cluster
from cloudsim.kubernetes.kinds import Release, releases
from cloudsim.state import Refusal
from embark.values import JsonDict, JsonMap

OWNER = "app.kubernetes.io/managed-by"
RELEASE = "meta.helm.sh/release-name"


class Helm:
    name = "helm"
    answered_by: AnsweredBy = "stand-in"

    def __init__(self, account: Account) -> None:
        self._account = account
        self._grammar = load_grammar("helm")
        self._repositories: dict[str, str] = {}
        self._installed: dict[tuple[str, str, str], Release] = {}  # The key is cluster, namespace and release.

    def run(self, call: Call) -> str:
        command = self._grammar.parse(call.words)
        handlers: dict[str, Callable[[ParsedCommand], str]] = {
            "repo add": self._add, "repo update": self._update, "upgrade": self._upgrade, "install": self._upgrade,
            "uninstall": self._uninstall, "list": self._list, "status": self._status,
            "repo list": lambda _: "".join(f"{name}\t{url}\n" for name, url in self._repositories.items()),
            "version": lambda _: "v3.19.2\n"}
        if command["--values"]:
            texts = [call.read(path) for path in command["--values"]]
            command = replace(command, flags={**command.flags, "--values": texts})
        return handlers[command.name](command)

    def _add(self, command: ParsedCommand) -> str:
        name, url = str(command.positionals["NAME"]), str(command.positionals["URL"])
        if not any(one.chart and one.chart["repository"].rstrip("/") == url.rstrip("/") for one in releases()):
            raise Refusal(f'Error: looks like "{url}" is not a valid chart repository or cannot be reached')
        self._repositories[name] = url
        return f'"{name}" has been added to your repositories\n'

    def _update(self, command: ParsedCommand) -> str:
        if not self._repositories:
            raise Refusal("Error: no repositories found. You must add one before updating")
        return "Update Complete. ⎈Happy Helming!⎈\n"

    def _upgrade(self, command: ParsedCommand) -> str:
        cluster = self._account.cluster()
        name, chart = str(command.positionals["RELEASE"]), str(command.positionals["CHART"])
        space = command.text("--namespace", "default")
        release = self._find(chart, command).named(name)
        if cluster.find("Namespace", space) is None:
            if not command["--create-namespace"]:
                raise Refusal(f'Error: create: failed to create: namespaces "{space}" not found')
            cluster.add("Namespace", space)
        key = (cluster.name, space, name)
        if key not in self._installed:
            if command.name == "upgrade" and not command["--install"]:
                raise Refusal(f'Error: UPGRADE FAILED: "{name}" has no deployed releases')
            if not command["--take-ownership"]:
                self._check_owner(cluster, release, space, name)
        elif command.name == "install":
            raise Refusal("Error: INSTALLATION FAILED: cannot re-use a name that is still in use")
        install(cluster, release, space, owner={OWNER: "Helm", RELEASE: name}, values=_values(command))
        self._installed[key] = release
        if command["--wait"]:
            cluster.advance(release.takes_s)
        return f'Release "{name}" has been upgraded. Happy Helming!\nNAMESPACE: {space}\nSTATUS: deployed\n'

    def _find(self, chart: str, command: ParsedCommand) -> Release:
        alias, _, name = chart.rpartition("/")
        url = command.text("--repo") or self._repositories.get(alias, "")
        if not url:
            raise Refusal(f"Error: repo {alias} not found")
        for one in releases():
            if one.chart and one.chart["repository"].rstrip("/") == url.rstrip("/") and one.chart["name"] == name:
                version = command.text("--version")
                if version and one.versions and not re.fullmatch(one.versions, version):
                    break
                return one
        raise Refusal(f'Error: chart "{name}" matching {command.text("--version")} not found in {alias} index. '
                      f"(try 'helm repo update'): no chart version found for {name}-{command.text('--version')}")

    def _check_owner(self, cluster: Cluster, release: Release, space: str, name: str) -> None:
        for kind, called in release.workloads:
            found = cluster.find(kind, called, space)
            if found is not None and found["metadata"].get("labels", {}).get(OWNER) != "Helm":
                raise Refusal(f'Error: Unable to continue with install: {kind} "{called}" in namespace "{space}" '
                              "exists and cannot be imported into the current release: invalid ownership metadata; "
                              f'label validation error: missing key "{OWNER}": must be set to "Helm"; annotation '
                              f'validation error: missing key "{RELEASE}": must be set to "{name}"')

    def _uninstall(self, command: ParsedCommand) -> str:
        cluster = self._account.cluster()
        space = command.text("--namespace", "default")
        lines = []
        for name in command.positionals["RELEASES"]:
            release = self._installed.pop((cluster.name, space, name), None)
            if release is None:
                if command["--ignore-not-found"]:
                    continue
                raise Refusal(f"Error: uninstall: Release not loaded: {name}: release: not found")
            for kind, called in release.workloads:
                cluster.objects.pop((kind, space, called), None)
            lines.append(f'release "{name}" uninstalled\n')
        return "".join(lines)

    def _list(self, command: ParsedCommand) -> str:
        cluster = self._account.cluster()
        wanted = None if command["--all-namespaces"] else command.text("--namespace", "default")
        rows = [f"{name}\t{space}\tdeployed\n" for where, space, name in self._installed
                if where == cluster.name and wanted in (None, space)]
        return "NAME\tNAMESPACE\tSTATUS\n" + "".join(rows)

    def _status(self, command: ParsedCommand) -> str:
        space, name = command.text("--namespace", "default"), str(command.positionals["RELEASE"])
        key = (self._account.cluster().name, space, name)
        if key not in self._installed:
            raise Refusal("Error: release: not found")
        return f"NAME: {key[2]}\nSTATUS: deployed\n"


def _values(command: ParsedCommand) -> JsonDict:
    """Return the values of all files, then those of flags."""
    found: JsonDict = {}
    for text in command["--values"] or []:
        try:
            given = yaml.safe_load(text) or {}
        except yaml.YAMLError as error:
            raise Refusal(f"Error: failed to parse values: error converting YAML to JSON: {error}") from error
        if not isinstance(given, dict):
            raise Refusal("Error: failed to parse values: error unmarshaling JSON: it is no map")
        found = _merged(found, given)
    for flag, read in (("--set", yaml.safe_load), ("--set-json", json.loads)):
        for one in command[flag] or []:
            path, _, text = one.partition("=")
            value: Any = read(text)
            for name in reversed(re.split(r"(?<!\\)\.", path)):
                value = {name.replace("\\.", "."): value}
            found = _merged(found, value)
    return found


def _merged(old: JsonMap, new: JsonMap) -> JsonDict:
    both = {name: _merged(old[name], value) if isinstance(value, Mapping) and isinstance(old.get(name), Mapping)
            else value for name, value in new.items()}
    return {**old, **both}
