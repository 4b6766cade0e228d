"""The kinds of objects that a cluster knows and the releases that add more, as facts with their source."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import field, replace
from functools import cache

from cloudsim.state import load_facts
from embark.values import JsonMap, frozen


@frozen
class ObjectKind:
    """A kind as `kubectl api-resources` lists it. Volcano's Job has the key `VolcanoJob`, to tell it from batch's."""

    key: str  # First part of the key of its objects.
    kind: str
    plural: str
    group: str
    versions: tuple[str, ...]
    is_namespaced: bool = True
    short: tuple[str, ...] = ()
    fields: tuple[str, ...] = ()  # Names of all fields of its spec; empty if they are not checked.
    immutable: tuple[str, ...] = ()  # Fields of its spec that cannot be changed.
    is_label: bool = False  # Its name becomes a label of pods or a part of a host name.
    required: tuple[str, ...] = ()  # Paths of fields that it cannot do without and that the schema does not require.

    @property
    def resource(self) -> str:
        """kubectl's name of the kind, such as `job.batch` and `pod`."""
        return f"{self.kind.lower()}.{self.group}" if self.group else self.kind.lower()

    def is_called(self, word: str) -> bool:
        """Return whether a word such as `jobs`, `job`, `jobs.batch`, `job.v1.batch` or `po` means this kind."""
        name, _, group = word.lower().partition(".")
        if name not in (self.plural, self.kind.lower(), *self.short):
            return False
        return group in ("", self.group, *(f"{version}.{self.group}" for version in self.versions))


@frozen
class Release:
    """The objects that an operator's manifests or its Helm chart install in a cluster."""

    name: str
    source: str
    kinds: tuple[ObjectKind, ...] = ()
    url: str = ""  # Regular expressions of the addresses that install it.
    kustomize: str = ""
    chart: Mapping[str, str] | None = None
    namespace: str = ""  # If empty, the namespace that helm is given.
    deployments: Sequence[str] = ()
    daemon_sets: Sequence[str] = ()
    webhook: str = ""
    takes_s: float = 30.0
    needs_server_side: bool = False
    needs_kind: str = ""
    is_named_for_release: bool = False  # Objects are called RELEASE-CHART unless RELEASE contains CHART.
    versions: str = ""  # A regular expression of the chart's versions; empty if all are accepted.
    tolerations: Mapping[str, str] = field(default_factory=dict)
    """Maps a DaemonSet to the value of the chart that has its tolerations, such as `daemonsets.tolerations`. DaemonSets
    that are not in it run on all nodes."""
    tolerated: Sequence[str] = ()  # Keys of taints that those DaemonSets tolerate unless the chart is given others.
    switches: Mapping[str, str] = field(default_factory=dict)
    """Maps a DaemonSet to the value of the chart that is true unless it shall not be installed."""
    needs: str = ""  # A DaemonSet without which the operator finds no device on a node.
    made_by: Mapping[str, JsonMap] = field(default_factory=dict)  # Objects the operator creates, by kind.

    @property
    def workloads(self) -> list[tuple[str, str]]:
        """The kind and the name of all that it runs."""
        names = {"Deployment": self.deployments, "DaemonSet": self.daemon_sets}
        return [(kind, name) for kind, own in names.items() for name in own]

    def named(self, release: str) -> "Release":
        """Return the release with the object names that Helm derives from the name of the release."""
        if not self.chart or not self.is_named_for_release:
            return self
        chart = self.chart["name"]
        full = release if chart in release else f"{release}-{chart}"
        return replace(self, daemon_sets=tuple(full if one == chart else one for one in self.daemon_sets))

    def is_at(self, address: str, *, kustomize: bool) -> bool:
        pattern = self.kustomize if kustomize else self.url
        return bool(pattern) and re.fullmatch(pattern, address) is not None


@cache
def builtin_kinds() -> tuple[ObjectKind, ...]:
    return tuple(_kind(name, row) for name, row in load_facts("kubernetes/kinds.toml")["kinds"].items())


@cache
def releases() -> tuple[Release, ...]:
    return tuple(Release(**{**row, "kinds": tuple(_kind(name, kind) for name, kind in row.get("kinds", {}).items())})
                 for row in load_facts("kubernetes/releases.toml")["release"])


def _kind(name: str, row: JsonMap) -> ObjectKind:
    lists = {key: tuple(value) for key, value in row.items() if isinstance(value, list)}
    return ObjectKind(**{"kind": name, **row, **lists, "key": name})
