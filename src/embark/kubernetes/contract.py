"""What a run needs of a cluster that exists, taken from its own manifests, and what of it a cluster lacks.

The items, their sentences and repairs stand in contract.toml, which the guide is made of too. Nothing is changed: the
admission of a pod is asked by a dry run.
"""

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Literal, Protocol

from embark.catalog import load_catalog
from embark.errors import EmbarkError, UserError
from embark.values import JsonDict, frozen, read_table
from .names import IDENTITY_ANNOTATIONS
from .objects import K8sObject, Objects, at, condition_of, quantity, rows, texts
from .pods import GPU_RESOURCES, TPU, blocking_taints, pod_specs, requested, trains

CONTRACT: JsonDict = read_table(__file__, "contract.toml")
ITEMS: dict[str, dict[str, str]] = CONTRACT["items"]
"""The items of the contract by name, in the order of the checks."""
VERBS = ("create", "patch", "delete")
READS = (("list", "pods"), ("get", "pods/log"), ("list", "events"))
QUEUE = "kueue.x-k8s.io/queue-name"
WORKLOAD_IDENTITY = "azure.workload.identity/use"
DEFAULT_CLASS = "storageclass.kubernetes.io/is-default-class"
MANY = {"ReadWriteMany", "ReadOnlyMany"}
AUTOSCALERS = ("/apis/karpenter.sh/v1", "/api/v1/namespaces/kube-system/configmaps/cluster-autoscaler-status")
"""Paths that exist where an autoscaler starts nodes."""
_HOST = re.compile(r"([^/]*[.:][^/]*)/")  # The registry of an image; without one it is Docker Hub's.


State = Literal["met", "unknown", "missing"]


class Forbidden(UserError):
    """The user lacks a permission."""


@frozen
class Finding:
    """An item of the contract as it was found."""

    name: str
    state: State  # `unknown`: the user may not read it.
    found: str
    fix: str = ""

    @property
    def expected(self) -> str:
        return ITEMS[self.name]["needs"].format(min_version=CONTRACT["min_version"])


class ClusterReader(Protocol):
    """Reads a cluster. A method raises `Forbidden` if the user may not read what is asked."""

    def raw(self, path: str) -> JsonDict | None:
        """Return the answer of the API at a path; None if there is nothing."""
        ...

    def get(self, kind: str, name: str, *, in_namespace: bool = True) -> JsonDict | None: ...

    def items(self, kind: str) -> list[JsonDict]: ...

    def may(self, verb: str, resource: str) -> bool: ...

    def refusal(self, thing: K8sObject) -> str:
        """Return why the API server would not create an object; empty if it would."""
        ...


@dataclass(slots=True)
class Contract:
    """The needs of one run, which `check` compares with a cluster."""

    objects: Objects
    namespace: str
    num_nodes: int  # Nodes that train at the same time.
    cloud: str = ""
    identities: dict[str, str] = field(default_factory=dict)  # By service account, where the spec names one.
    secrets: dict[str, str] = field(default_factory=dict)  # Those that its pods read, with the command for each.
    kinds: tuple[tuple[str, str], ...] = ()  # Further pairs of an API version and a kind.
    resources: list[str] = field(default_factory=list)  # The kinds of its objects as kubectl names them.

    def check(self, cluster: ClusterReader) -> Iterator[Finding]:
        """Yield each item as soon as it is known. Without an API or a namespace nothing else can be asked."""
        for check in (self._version, self._kinds, self._namespace, self._rights, self._account, self._registry,
                      self._secrets, self._queue, self._claim, self._storage_class, self._labels, self._admission):
            try:
                for finding in check(cluster):
                    yield finding
                    if finding.state == "missing" and finding.name in ("cluster", "namespace"):
                        return
            except UserError as error:  # of a kind that is not installed, too
                state: State = "unknown" if isinstance(error, Forbidden) else "missing"
                yield Finding(check.__name__[1:], state, error.what, error.fix)

    @property
    def pods(self) -> list[K8sObject]:
        return [pod for one in self.objects.all for pod in pod_specs(one)]

    def _finding(self, name: str, is_met: bool, found: str, **values: object) -> Finding:
        if is_met:
            return Finding(name, "met", found)
        return Finding(name, "missing", found, ITEMS[name]["fix"].format(
            namespace=self.namespace, min_version=CONTRACT["min_version"], **values))

    def _version(self, cluster: ClusterReader) -> Iterator[Finding]:
        try:
            version = cluster.raw("/version") or {}
        except EmbarkError as error:
            yield Finding("cluster", "missing", error.what, error.fix or ITEMS["cluster"]["fix"])
            return
        yield Finding("cluster", "met", "it answers")
        number = [int(re.sub(r"\D.*", "", f"0{version.get(part)}")) for part in ("major", "minor")]  # 36+ on some
        least = [int(part) for part in CONTRACT["min_version"].split(".")]
        yield self._finding("version", number >= least, ".".join(map(str, number)))

    def _kinds(self, cluster: ClusterReader) -> Iterator[Finding]:
        kinds = sorted({(str(one.get("apiVersion")), str(one.get("kind"))) for one in self.objects.all} | {*self.kinds})
        is_met = True
        for version, kind in kinds:
            listed = cluster.raw(f"/apis/{version}" if "/" in version else f"/api/{version}") or {}
            names = [str(one["name"]) for one in rows(listed, "resources") if one.get("kind") == kind]
            if names:  # the shortest: `jobs/status` has the same kind
                self.resources.append(".".join(filter(None, (min(names, key=len), version.rpartition("/")[0]))))
                continue
            is_met = False
            install = CONTRACT["installs"].get("vcjob" if "volcano" in version else kind.lower(), "")
            yield self._finding("kinds", False, f"{kind} of {version} is not known", install=install.format_map(
                load_catalog().versions) or f"ask the cluster's owner to install the operator of {kind}")
        if is_met:
            yield Finding("kinds", "met", ", ".join(dict.fromkeys(kind for _, kind in kinds)))

    def _namespace(self, cluster: ClusterReader) -> Iterator[Finding]:
        found = cluster.get("namespaces", self.namespace, in_namespace=False)
        yield self._finding("namespace", found is not None,
                            self.namespace if found else f"there is no namespace {self.namespace}")

    def _rights(self, cluster: ClusterReader) -> Iterator[Finding]:
        wanted = [*((verb, resource) for resource in self.resources for verb in VERBS), *READS]
        lacks = [f"{verb} {resource}" for verb, resource in wanted if not cluster.may(verb, resource)]
        said = f"you may not {', '.join(lacks)}" if lacks else f"all {len(wanted)} that the run needs"
        yield self._finding("rights", not lacks, said,
                            resources=",".join([*self.resources, *(resource for _, resource in READS)]))

    def _account(self, cluster: ClusterReader) -> Iterator[Finding]:
        names = sorted({str(pod["serviceAccountName"]) for pod in self.pods if pod.get("serviceAccountName")})
        accounts = {name: cluster.get("serviceaccounts", name) for name in names}
        lacks = [name for name, found in accounts.items() if found is None]
        yield self._finding("account", not lacks, ", ".join(names) if not lacks else
                            f"{self.namespace} has no service account {', '.join(lacks)}", account=lacks and lacks[0])
        key = IDENTITY_ANNOTATIONS[self.cloud]
        is_needed = WORKLOAD_IDENTITY in str(self.objects.all)
        for name, found in accounts.items() if key else ():
            wanted, has = self.identities.get(name, ""), texts(at(found or {}, "metadata.annotations")).get(key, "")
            if found is not None:
                yield self._finding(
                    "identity", has == wanted if wanted else bool(has) or not is_needed, f"{name}: " + (
                        has or f"no annotation {key}: the nodes, or EKS Pod Identity, grant it"),
                    account=name, annotation=key, identity=wanted or "IDENTITY")

    def _registry(self, cluster: ClusterReader) -> Iterator[Finding]:
        images = sorted({str(one.get("image")) for pod in self.pods for one in rows(pod, "containers")})
        hosts = sorted({match[1] for image in images if (match := _HOST.match(image))})
        own = [image for image in images if image.startswith(("embark:", "registry.example.com/"))]
        if own:
            yield Finding("registry", "missing", f"no registry has {own[0]}",
                          "embark image SPEC --tag REGISTRY/embark:1 --push builds, pushes and sets it")
            return
        secrets = {str(one["name"]) for pod in self.pods for one in rows(pod, "imagePullSecrets")}
        for name in sorted(secrets):
            found = cluster.get("secrets", name)
            logins = str(Objects((found,)).data_of("Secret", name, self.namespace)) if found else ""
            lacks = [host for host in hosts if host not in logins]
            said = f"the secret {name} has no login for {lacks[:1]}" if found else f"there is no secret {name}"
            yield self._finding("registry", not lacks, said if lacks else f"by the secret {name}", secret=name,
                                host=lacks[0] if lacks else "")
        if not secrets:
            yield Finding("registry", "met", f"{', '.join(hosts)}: by the right of the nodes or the service account")

    def _secrets(self, cluster: ClusterReader) -> Iterator[Finding]:
        for name, command in self.secrets.items():
            found = cluster.get("secrets", name)
            yield self._finding("secrets", found is not None, name if found else f"there is no Secret {name}",
                                command=command)

    def _queue(self, cluster: ClusterReader) -> Iterator[Finding]:
        names = {texts(at(one, "metadata.labels")).get(QUEUE, "") for one in self.objects.all} - {""}
        for name in names:
            found = cluster.get("localqueues.kueue.x-k8s.io", name)
            is_active = found is not None and condition_of(found.get("status") or {}, "Active") is not None
            said = "is not active" if found else "is not there"
            yield self._finding("queue", is_active, name if is_active else f"the LocalQueue {name} {said}")

    def _claim(self, cluster: ClusterReader) -> Iterator[Finding]:
        names = {str(at(volume, "persistentVolumeClaim.claimName") or "")
                 for pod in self.pods for volume in rows(pod, "volumes")} - {""}
        for name in names:
            found = cluster.get("persistentvolumeclaims", name) or {}
            phase, modes = at(found, "status.phase"), {*(at(found, "spec.accessModes") or ())}
            is_met = phase == "Bound" and (self.num_nodes == 1 or bool(MANY & modes))
            said = f"{name} is {phase}, {', '.join(sorted(modes))}" if found else f"there is no claim {name}"
            yield self._finding("claim", is_met, said, claim=name)

    def _storage_class(self, cluster: ClusterReader) -> Iterator[Finding]:
        claims = [claim for one in self.objects.all for claim in rows(one, "spec.volumeClaimTemplates")]
        for claim in claims:
            classes = cluster.items("storageclasses.storage.k8s.io")
            wanted = str(at(claim, "spec.storageClassName") or "")
            fits = [str(at(one, "metadata.name")) for one in classes if wanted == str(at(one, "metadata.name")) or (
                not wanted and texts(at(one, "metadata.annotations")).get(DEFAULT_CLASS) == "true")]
            said = f"there is no class {wanted}" if wanted else "no class is the default"
            yield self._finding("storage_class", bool(fits), fits[0] if fits else said)

    def _labels(self, cluster: ClusterReader) -> Iterator[Finding]:
        """Compare the pods with the nodes; of several pods the first that fits no node is reported."""
        nodes = [node for node in cluster.items("nodes") if condition_of(node.get("status") or {}, "Ready")
                 and not at(node, "spec.unschedulable")]
        try:
            is_growing = any(cluster.raw(path) is not None for path in AUTOSCALERS)
        except Forbidden:
            is_growing = True
        findings: dict[str, Finding] = {}
        for pod in sorted(self.pods, key=lambda pod: not trains(pod)):
            for one in self._node_findings(pod, nodes, self.num_nodes if trains(pod) else 1):
                if one.name == "labels" and one.state == "missing" and is_growing:
                    one = replace(one, state="unknown", found=f"{one.found}; an autoscaler may start them")
                if one.name not in findings or findings[one.name].state == "met":
                    findings[one.name] = one
        yield from findings.values()

    def _node_findings(self, pod: K8sObject, nodes: list[JsonDict], num: int) -> Iterator[Finding]:
        wanted = texts(pod.get("nodeSelector"))
        labels = ", ".join(f"{name}={value}" for name, value in wanted.items()) or "any label"
        chosen = [one for one in nodes if wanted.items() <= texts(at(one, "metadata.labels")).items()]
        yield self._finding("labels", len(chosen) >= num, f"{len(chosen)} of {num} ready nodes with {labels}")
        num = min(num, len(chosen))
        taints = Counter(taint for one in chosen for taint in blocking_taints(one, rows(pod, "tolerations")))
        chosen = [one for one in chosen if not list(blocking_taints(one, rows(pod, "tolerations")))]
        if num:
            yield self._finding("taints", len(chosen) >= num, f"{len(chosen)} of {num} nodes" + (
                f"; not tolerated: {', '.join(taints)}" if taints else ""), taint='", "'.join(taints))
        for resource, amount in requested(pod).items() if chosen else ():
            amounts = sorted((quantity(texts(at(one, "status.allocatable")).get(resource, "0")) or 0.0
                              for one in chosen), reverse=True)
            item = "devices" if resource in (*GPU_RESOURCES, TPU) else "fabric" if "/" in resource else "room"
            least = amounts[min(num, len(amounts)) - 1]
            yield self._finding(item, least >= amount, f"a pod takes {amount:,g} of {resource}, and nodes have "
                                f"{least:,g}", resource=resource, most=f"{least:.0f}")

    def _admission(self, cluster: ClusterReader) -> Iterator[Finding]:
        # The predictor of an InferenceService has fields beside those of a pod.
        for pod in (pod for pod in self.pods if "minReplicas" not in pod):
            # The volumes of a StatefulSet's claims are not in its pods' template.
            named = {str(mount.get("name")) for one in rows(pod, "containers") for mount in rows(one, "volumeMounts")}
            claimed = sorted(named - {str(one.get("name")) for one in rows(pod, "volumes")})
            volumes = [*rows(pod, "volumes"), *({"name": name, "emptyDir": {}} for name in claimed)]
            thing = {"apiVersion": "v1", "kind": "Pod", "spec": {**pod, "volumes": volumes},
                     "metadata": {"name": "embark-contract", "namespace": self.namespace}}
            if said := cluster.refusal(thing):
                yield self._finding("admission", False, said)
                return
        yield Finding("admission", "met", "the API server would create the pods")
