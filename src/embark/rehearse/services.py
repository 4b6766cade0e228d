"""Which names resolve, and to which pods: as the cluster's DNS would have it, from the Services there are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from embark.rehearse.objects import Objects, at, name_of, namespace_of
from embark.rehearse.pods import Pod


@dataclass(frozen=True, slots=True)
class Service:
    """A Service, of a file or made by a controller."""

    name: str
    namespace: str
    selector: Mapping[str, str]
    is_headless: bool
    publishes_not_ready: bool

    def selects(self, pod: Pod) -> bool:
        held = pod.labels
        return (bool(self.selector) and pod.namespace == self.namespace
                and all(held.get(name) == value for name, value in self.selector.items()))


@dataclass(frozen=True, slots=True)
class Names:
    """What the pods can look up."""

    by_pod: Mapping[str, tuple[str, ...]]
    """Pod to the names that lead to it."""

    def resolves(self, host: str) -> bool:
        return any(host in names for names in self.by_pod.values())

    def pods_of(self, host: str) -> list[str]:
        return [pod for pod, names in self.by_pod.items() if host in names]


def read_services(objects: Objects) -> list[Service]:
    return [Service(name_of(one), namespace_of(one),
                    {str(key): str(value) for key, value in (at(one, "spec.selector") or {}).items()},
                    str(at(one, "spec.clusterIP")) == "None", bool(at(one, "spec.publishNotReadyAddresses")))
            for one in objects.of_kind("Service")]


def names_of(pods: Sequence[Pod], services: Sequence[Service]) -> Names:
    """A pod's own name needs a headless Service called like its subdomain; a Service's name leads to all it selects."""
    found: dict[str, list[str]] = {pod.name: [] for pod in pods}
    for service in services:
        for pod in pods:
            if not service.selects(pod) or not _is_published(service, pod):
                continue
            found[pod.name] += _service_names(service)
            if service.is_headless and service.name == pod.subdomain:
                found[pod.name] += pod.names
    return Names({pod: tuple(dict.fromkeys(names)) for pod, names in found.items()})


def why_not(host: str, pods: Sequence[Pod], services: Sequence[Service]) -> tuple[str, str]:
    """Why a name resolves nowhere, and the fix."""
    first, _, rest = host.partition(".")
    sub = rest.partition(".")[0]
    target = next((pod for pod in pods if pod.hostname == first), None)
    if target is None and not any(service.name == first for service in services):
        if pods and not pods[0].hostname.rpartition("-")[2].isdigit():
            return ("the pods of a Job that is not indexed have random names",
                    "completionMode: Indexed, subdomain: NAME and a headless Service of that NAME; then NAME-0.NAME")
        has = ", ".join(sorted({pod.hostname for pod in pods})[:4])
        return f"no pod and no Service is called {first}; the pods are called {has}", f"{_right_name(pods)}"
    if target is not None and not sub:
        return ("a pod's name alone resolves in that pod only, not in others",
                f"{_right_name(pods)}, with a headless Service called like the pods' subdomain")
    service = next((one for one in services if one.name == (sub or first)), None)
    if target is not None and target.subdomain != sub:
        said = f"subdomain {target.subdomain}" if target.subdomain else "no subdomain"
        return f"the pods have {said}, not {sub}", f"subdomain: {sub} in the pods' template"
    if service is None:
        return f"there is no Service {sub or first}", f"a headless Service {sub or first} that selects the pods"
    if not service.is_headless:
        return f"Service {service.name} is not headless, so pods have no names below it", "clusterIP: None"
    if target is not None and not service.selects(target):
        return (f"Service {service.name} does not select the pods",
                "selector: {batch.kubernetes.io/job-name: NAME OF THE JOB}, in the namespace of the pods")
    return (f"Service {service.name} publishes a pod only once it is ready, and ranks meet before that",
            "publishNotReadyAddresses: true")


def _right_name(pods: Sequence[Pod]) -> str:
    pod = min(pods, key=lambda one: one.index)
    return f"the first pod would be {pod.hostname}.{pod.subdomain or 'SERVICE'}"


def _is_published(service: Service, pod: Pod) -> bool:
    """Without a probe a pod is ready as soon as it runs."""
    return service.publishes_not_ready or not pod.has_readiness_probe


def _service_names(service: Service) -> tuple[str, ...]:
    name, space = service.name, service.namespace
    return (name, f"{name}.{space}", f"{name}.{space}.svc", f"{name}.{space}.svc.cluster.local")
