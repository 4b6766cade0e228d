"""A round of the soak of serving: actions drawn from its seed, and what must hold after each."""

from __future__ import annotations

import http.client
import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from integration.faults.conftest import Zygote
from serving_soak_follower import Follower
from serving_soak_place import LAX, NUM_ROWS, STRICT, Held, Place, Scores, SoakRun
from serving_soak_server import HOOK, LIMIT_S, Answer, Clients, LostRequests, Server
from soak_comparison import Difference

from embark.errors import DataError
from embark.export.artifact import open_artifact, open_versions, set_current
from embark.export.rollback import rollback
from embark.publish.publisher import PublishResult, publish
from embark.trainers import export_run

ACTIONS_A_ROUND = 30


class Stopped(Exception):
    """Another round has found what was looked for."""


@dataclass
class Counts:
    """What happened in a round, or in all."""

    number: int = -1
    case: str = ""
    actions: Counter[str] = field(default_factory=Counter)
    kills: Counter[str] = field(default_factory=Counter)
    seconds: dict[str, float] = field(default_factory=dict)  # Spent on each kind of action.
    num_changes: int = 0
    num_wiped: int = 0
    num_rows: int = 0
    num_failed: int = 0  # Around kills, where requests may fail.
    num_lost: int = 0
    difference: str = ""
    log: list[str] = field(default_factory=list)

    def add(self, other: Counts) -> None:
        self.actions += other.actions
        self.kills += other.kills
        for name, spent_s in other.seconds.items():
            self.spend(name, spent_s)
        for name in ("num_changes", "num_wiped", "num_rows", "num_failed", "num_lost"):
            setattr(self, name, getattr(self, name) + getattr(other, name))

    def spend(self, name: str, spent_s: float) -> None:
        self.seconds[name] = self.seconds.get(name, 0.0) + spent_s


class Round:
    """One place with a server and its clients, whose versions and processes are disturbed again and again."""

    stopping = threading.Event()

    def __init__(self, folder: Path, place: str, rng: random.Random, zygote: Zygote, env: dict[str, str], plant: str,
                 counts: Counts, *, workers: int, tables: str) -> None:
        self.folder, self.rng, self.zygote, self.env, self.plant, self.counts = folder, rng, zygote, env, plant, counts
        self.tables = tables
        self.scores = Scores(folder, tables)
        self.place = Place(place, self.scores)
        self.runs = [SoakRun(folder, f"run-{number}", rng.randrange(1 << 30), self.scores) for number in range(2)]
        self.server = Server(zygote, place, folder, workers, env, plant)
        self.clients = Clients(self.server, 2, 0.4, str(rng.random()))
        self.follower: Follower | None = None
        self.pids: list[int] = []

    def play(self, num_actions: int, only: list[str]) -> None:
        """Play so many actions, of those that are named if some are."""
        began_s = time.monotonic()
        self.export(self.runs[0])
        self.server.start()
        weights: dict[Callable[[], None], int] = {
            self.export_some: 5, self.roll_back: 5, self.publish_one: 5, self.refused: 2, self.retain: 1,
            self.kill_exporter: 5, self.kill_publisher: 4, self.kill_before_gate: 1, self.roll_back_while_judged: 2,
            self.two_publishers: 1, self.train_anew: 1, self.wipe: 5, self.reuse: 4, self.kill_server: 4,
            self.stop_server: 2, self.damage_current: 1, self.damage_next: 2, self.missing_link: 1}
        if self.server.workers > 1:
            weights |= {self.kill_worker: 7, self.kill_server: 2, self.stop_server: 1}
        if self.rng.random() < 0.4 or "kill_follower" in only:
            self.follower = Follower(self.zygote, self.folder, self.rng, self.plant)
            weights |= {self.kill_follower: 8, self.publish_follower: 3}
        weights = {action: weight for action, weight in weights.items() if not only or action.__name__ in only}
        with self.clients.running():
            self.settle()
            self.counts.spend("start", time.monotonic() - began_s)
            for action in self.rng.choices([*weights], [*weights.values()], k=num_actions):
                if self.stopping.is_set():
                    raise Stopped
                name = action.__name__.replace("_", " ")
                self.counts.log.append(name)
                began_s = time.monotonic()
                action()
                self.counts.actions[name] += 1
                self.server.check()
                if self.rng.random() < 0.6:
                    self.settle()
                self.counts.spend(name, time.monotonic() - began_s)
            self.settle()
            if self.follower:
                began_s = time.monotonic()
                self.follower.finish()
                self.compare()
                self.counts.spend("finish", time.monotonic() - began_s)

    # What must hold.

    def settle(self) -> None:
        """The server comes to answer with what is current, by all of its processes, and every answer was right."""
        held, until, last = self.place.look(), time.monotonic() + LIMIT_S, ""
        while True:
            try:
                answer = self.server.ask()
                if self.is_of(answer, held):
                    break
                last = f"version {answer.version}, which is {self.scores.matching(0, answer.scores)}"
                if answer.version == held.number and held.identity.startswith(answer.identity):
                    raise Difference(f"version {held.number} ({self.scores.about(held.key)}) is current, and the "
                                     f"server answers with {last}:\n{self.server.tail()}")
                if self.plant and self.server.refused_version() == held.number:  # else it is waited for
                    raise Difference(f"version {held.number} is current, and the server refuses it:\n"
                                     f"{self.server.tail()}")
            except (OSError, http.client.HTTPException) as error:
                last = repr(error)
            if time.monotonic() > until:
                raise Difference(f"version {held.number} ({self.scores.about(held.key)}) is current for {LIMIT_S:.0f} "
                                 f"s, and the server answers with {last}:\n{self.server.tail()}")
            self.server.check()
            if self.stopping.is_set():
                raise Stopped
            time.sleep(self.server.poll_s / 2)
        answers = self.server.ask_all()
        for answer in answers:
            if not self.is_of(answer, held):
                raise Difference(f"version {held.number} ({self.scores.about(held.key)}) answers, and then version "
                                 f"{answer.version}, which is {self.scores.matching(answer.block, answer.scores)}")
        self.counts.num_rows += NUM_ROWS * (1 + len(answers))
        self.compare()
        self.place.settle()

    def is_of(self, answer: Answer, held: Held) -> bool:
        return answer.version == held.number and held.identity.startswith(answer.identity) and \
            not self.scores.num_wrong(held.key, answer.block, answer.scores)

    def compare(self) -> None:
        """Compare each answer of the clients with the scores of the version that it names."""
        answers, failures = self.clients.take()
        for answer in answers:
            self.compare_one(answer)
        for one in failures:
            if not any(began <= one.got_s and one.sent_s <= ended + 1.0 for began, ended in self.server.windows):
                self.counts.num_lost += 1
                raise Difference(f"a request failed, and nothing was killed: {one.why}\n{self.server.tail()}")
            self.counts.num_failed += 1

    def compare_one(self, answer: Answer) -> None:
        allowed = self.place.allowed(answer.sent_s)
        named = [held for held in allowed if held.number == answer.version
                 and held.identity.startswith(answer.identity)]
        if not named:
            raise Difference(f"version {answer.version} {answer.identity} answered, and was not current: "
                             f"{[held.number for held in allowed]} were")
        wrong = min(self.scores.num_wrong(held.key, answer.block, answer.scores) for held in named)
        if wrong:
            raise Difference(f"{wrong} of {NUM_ROWS} scores of version {answer.version} are not those of "
                             f"{' or '.join(self.scores.about(held.key) for held in named)}, but of "
                             f"{self.scores.matching(answer.block, answer.scores)}")
        self.counts.num_rows += NUM_ROWS

    def must_hold(self, key: str, why: str) -> None:
        held = self.place.look()
        if held.key != key:
            raise Difference(f"{why}: version {held.number} is current ({self.scores.about(held.key)}) instead of "
                             f"{self.scores.about(key)}")

    # Versions.

    def a_run(self) -> SoakRun:
        return self.rng.choice(self.runs)

    def export(self, run: SoakRun, *, delta: bool = False) -> None:
        key = run.save_next()
        export_run(run.uri, self.place.uri, tables=self.tables, delta=delta)  # type: ignore[arg-type]
        self.must_hold(key, "after an export")

    def export_some(self) -> None:
        """Full versions and deltas, one or a few between two looks of the server."""
        run = self.a_run()
        for _ in range(self.rng.randint(1, 3)):
            self.export(run, delta=self.rng.random() < 0.7)

    def publish(self, run: str, bounds: tuple[str, ...] = LAX, **more: bool) -> PublishResult:
        result = publish(run, to=self.place.uri, sets=(*bounds, f"publish.tables={self.tables}"), **more)
        self.place.look()  # A strict gate lets a version pass that is better, and it may answer at once.
        return result

    def publish_one(self) -> None:
        run = self.a_run()
        key = run.save_next()
        result = self.publish(run.uri)
        if result.refused:
            raise Difference(f"the gate refused what all bounds allow: {result.refused}")
        self.must_hold(key, "after publishing")

    def refused(self) -> None:
        """A version that the gate refuses is never current."""
        before, run = self.place.look(), self.a_run()
        run.save_next()
        result = self.publish(run.uri, STRICT)
        self.must_hold(before.key if result.refused else run.key, "after a verdict")

    def roll_back(self) -> None:
        """Back and forth between versions that are there, one or a few between two looks of the server."""
        for _ in range(self.rng.randint(1, 4)):
            self.roll_back_to(self.rng.choice(self.place.numbers_there()[-4:]))
            if self.rng.random() < 0.6:
                self.settle()

    def roll_back_to(self, number: int) -> str:
        rollback(self.place.uri, number)
        key = self.place.numbers[number]
        self.must_hold(key, f"after a rollback to version {number}")
        return key

    def retain(self) -> None:
        """Only the newest versions are kept, and what they need."""
        run = self.a_run()
        key = run.save_next()
        self.publish(run.uri, (*LAX, f"publish.keep_versions={self.rng.randint(1, 3)}"))
        self.must_hold(key, "after old versions were removed")
        open_artifact(self.place.uri)

    def wipe(self) -> None:
        """The place, or all of its versions, is removed and written again."""
        run = self.a_run()
        self.compare()
        self.place.wipe()
        self.counts.num_wiped += 1
        self.export(run)
        for _ in range(self.rng.randint(0, 2)):
            self.export(run, delta=True)

    def reuse(self) -> None:
        """Versions behind the current one are removed, and others are written within a look of the server."""
        run = self.a_run()
        for _ in range(2):
            self.export(run, delta=True)
            self.settle()
        last = self.place.look().number
        parent = max((number for number in self.place.numbers_there() if number < last), default=0)
        if not parent:
            return
        self.roll_back_to(parent)
        self.settle()
        self.place.remove(f"version-{last:09d}")
        self.counts.num_wiped += 1
        for _ in range(2):
            self.export(run, delta=True)
        self.settle()

    def train_anew(self) -> None:
        """A run that was published is trained again under its name, to the same step."""
        run = self.a_run()
        key = run.save_next()
        self.publish(run.uri)
        self.must_hold(key, "after publishing")
        key = run.train_anew(self.rng.randrange(1 << 30))
        self.publish(run.uri)
        self.must_hold(key, "after a run was trained anew and published")

    # Publishers and exporters that are killed or held.

    def fork(self, *words: str, **hook_words: str) -> int:
        (pid,) = self.zygote.fork(1, [*words, "--to", self.place.uri], cwd=self.folder,
                                  log=self.folder / "commands.log", hook=HOOK, plant=self.plant,
                                  env={**self.env, "EMBARK_CACHE": str(self.folder / "cache")}, **hook_words)
        self.pids.append(pid)
        return pid

    def publisher(self, run: SoakRun, **hook_words: str) -> int:
        sets = (*LAX, f"publish.tables={self.tables}")
        return self.fork("publish", run.uri, *(word for one in sets for word in ("--set", one)), **hook_words)

    def code(self, pid: int, *allowed: int) -> int:
        code = self.zygote.code(pid, LIMIT_S)
        if code is None or code not in allowed:
            raise Difference(f"a command ended with {code}, not with {allowed}:\n{self.commands()}")
        return code

    def commands(self) -> str:
        log = self.folder / "commands.log.0"
        return "\n".join(log.read_text(errors="replace").splitlines()[-25:]) if log.exists() else ""

    def kill_soon(self, pid: int, what: str) -> None:
        time.sleep(self.rng.uniform(0.0, 0.7))
        if self.zygote.code(pid) is None:
            os.kill(pid, signal.SIGKILL)
            self.counts.kills[what] += 1
        self.code(pid, -9, 0)

    def kill_exporter(self) -> None:
        before, run = self.place.look(), self.a_run()
        key = run.save_next()
        delta = ("--delta",) if self.rng.random() < 0.5 else ()
        self.kill_soon(self.fork("export", run.uri, "--tables", self.tables, *delta), "exporter")
        if (held := self.place.look()).key not in (before.key, key):
            raise Difference(f"after an exporter was killed, version {held.number} is current "
                             f"({self.scores.about(held.key)})")

    def kill_publisher(self) -> None:
        """A publisher that is killed leaves the one version or the other; started again, it publishes."""
        before, run = self.place.look(), self.a_run()
        key = run.save_next()
        self.kill_soon(self.publisher(run), "publisher")
        if self.place.look().key not in (before.key, key):
            raise Difference("a version nobody published is current after a publisher was killed")
        self.publish(run.uri)
        self.must_hold(key, "after a publisher was killed and started again")

    def kill_before_gate(self) -> None:
        """A publisher is killed as its version is current; one that is started after a rollback leaves that alone."""
        before, run = self.place.look(), self.a_run()
        run.save_next()
        self.code(self.publisher(run, die_after="set_current"), -9)
        self.counts.kills["publisher"] += 1
        self.place.look()
        self.roll_back_to(before.number)
        self.publish(run.uri)
        self.must_hold(before.key, "after a rollback, and a start of the publisher that was killed before it")

    def held(self, run: SoakRun) -> tuple[int, Path]:
        """A publisher that has its verdict and does not go on while a file is there."""
        mark = self.folder / f"verdict-{len(self.pids)}"
        pid, until = self.publisher(run, hold=str(mark)), time.monotonic() + LIMIT_S
        while not mark.exists():
            if self.zygote.code(pid) is not None or time.monotonic() > until:
                raise Difference(f"a publisher came to no verdict ({self.zygote.code(pid)}):\n{self.commands()}")
            time.sleep(0.005)
        return pid, mark

    def roll_back_while_judged(self) -> None:
        """A rollback wins over a verdict that was made before it."""
        run = self.a_run()
        candidates = self.place.numbers_there()
        run.save_next()
        pid, mark = self.held(run)
        key = self.roll_back_to(self.rng.choice(candidates[-3:]))
        mark.unlink()
        self.code(pid, 0, 1, 64, 70)
        self.must_hold(key, "after a rollback during a publish")

    def two_publishers(self) -> None:
        """A publisher of an earlier step that comes late does not replace a later one."""
        run = self.a_run()
        run.save_next()
        pid, mark = self.held(run)
        key = run.save_next()
        self.code(self.publisher(run), 0)
        self.must_hold(key, "after the second of two publishers")
        mark.unlink()
        self.code(pid, 0, 1, 64, 70)
        self.must_hold(key, "after the first of two publishers came last")

    # The server's processes.

    def kill_worker(self) -> None:
        with self.server.disturbed():
            if not (pids := self.server.worker_pids()):
                raise Difference(f"the server has no workers:\n{self.server.tail()}")
            victim = self.rng.choice(pids)
            os.kill(victim, signal.SIGKILL)
            self.counts.kills["worker"] += 1
            until = time.monotonic() + LIMIT_S
            while len(set(self.server.worker_pids()) - {victim}) < self.server.workers:
                if time.monotonic() > until:
                    raise Difference(f"a worker was not replaced:\n{self.server.tail()}")
                time.sleep(0.02)
            if self.rng.random() < 0.5:
                self.export_some()  # while it loads
            self.settle()

    def kill_server(self) -> None:
        with self.server.disturbed():
            self.server.kill()
            self.counts.kills["server"] += 1
            self.server.start()

    def stop_server(self) -> None:
        """SIGTERM while requests are in flight: each that was sent is answered."""
        with self.server.disturbed():
            try:
                answers = self.server.stop_with_requests(self.rng.randint(8, 28))
            except LostRequests as error:
                self.counts.num_lost += error.num
                raise
            for answer in answers:
                self.compare_one(answer)
            self.server.start()

    # Damage.

    def change(self) -> Callable[[bytes], bytes]:
        place, cut = self.rng.random(), self.rng.random()
        return self.rng.choice([
            lambda data: data[: int(cut * len(data))],
            lambda data: data[: (at := int(place * (len(data) - 8)))] + bytes(255 - one for one in data[at : at + 8])
            + data[at + 8 :]])

    def tensor_file(self, number: int) -> str:
        return self.rng.choice([path for path in self.place.files(number) if path.endswith(".safetensors")])

    def damage_current(self) -> None:
        """A file of the version that answers is changed: it goes on, and the next version is taken."""
        self.settle()
        held = self.place.look()
        self.place.damage(self.tensor_file(held.number), self.change())
        for _ in range(3):
            self.compare_one(self.server.must_answer(self.rng.randrange(3)))
        self.heal()

    def damage_next(self) -> None:
        """A version that is damaged before the server has seen it is refused."""
        self.settle()
        before, run = self.place.look(), self.a_run()
        run.save_next()
        result = self.publish(run.uri, STRICT)  # a candidate that is not current
        if not result.refused:
            return
        self.place.look()
        self.place.damage(self.tensor_file(result.version), self.change())
        self.refuses(result.version, before)

    def missing_link(self) -> None:
        """A delta whose parent is gone is refused."""
        run = self.a_run()
        self.export(run)
        middle = self.place.look()
        self.export(run, delta=True)
        before = self.place.look()
        run.save_next()
        result = self.publish(run.uri, STRICT)
        if not result.refused or result.parent != before.number:
            return
        self.roll_back_to(middle.number)
        self.settle()
        self.place.remove(f"version-{before.number:09d}")
        self.counts.num_wiped += 1
        with suppress(DataError):
            rollback(self.place.uri, result.version)
            raise Difference(f"version {result.version} lacks its parent, and a rollback makes it current")
        self.refuses(result.version, middle)

    def refuses(self, number: int, before: Held) -> None:
        """The server keeps answering with what it has, and says that the current version is refused."""
        set_current(open_versions(self.place.uri), number, reason="rollback")  # which the command itself may refuse
        until = time.monotonic() + LIMIT_S
        while self.server.refused_version() != number:
            if self.server.must_answer().version == number:
                raise Difference(f"version {number} is damaged, and answers")
            if time.monotonic() > until:
                raise Difference(f"version {number} is damaged, and the server does not say so:\n{self.server.tail()}")
            time.sleep(self.server.poll_s / 2)
        for answer in self.server.ask_all():
            if not self.is_of(answer, before):
                raise Difference(f"version {number} is damaged, and version {answer.version} answers instead of "
                                 f"{before.number}")
        self.compare()
        self.heal()

    def heal(self) -> None:
        """A full version replaces what is damaged, and all others are removed."""
        self.export(self.a_run())
        self.settle()
        current = self.place.look().number
        for number in self.place.numbers_there():
            if number != current:
                self.place.remove(f"version-{number:09d}")

    # A run that follows a stream.

    def kill_follower(self) -> None:
        assert self.follower
        before = self.follower.num_kills
        self.follower.kill()
        self.counts.kills["follower"] += self.follower.num_kills - before

    def publish_follower(self) -> None:
        """What the follower has learned so far is served."""
        assert self.follower
        self.follower.go_on()
        if not self.follower.committed():
            return
        result = self.publish(self.follower.uri, gate=False)
        if result.is_new:
            self.must_hold(self.scores.add(self.follower.uri, result.step), "after the follower was published")

    def end(self) -> None:
        """Leave no process behind."""
        self.counts.num_changes = self.place.num_changes
        if self.follower:
            self.follower.end()
        for pid in [*self.pids, *([self.server.pid] if self.server.pid else [])]:
            if self.zygote.code(pid) is None:
                os.kill(pid, signal.SIGKILL)
