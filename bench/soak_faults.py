"""The faults of the soak: one a start, then a last start that nothing disturbs."""

from __future__ import annotations

import random
import shutil
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

from integration.cloud.faulty_proxy import Proxy
from integration.faults.conftest import Ranks, Run
from soak_cases import Case
from soak_comparison import Difference, Result

HOOK = "soak_hooks:disturb"
FAULTS_A_ROUND = 12
HASTY = {"max_retries": 9, "first_wait_s": 0.02, "longest_wait_s": 0.1, "give_up_s": 60}
LEASE = {"EMBARK_LEASE_S": "6"}
"""A lease that a process on a starved machine still renews in time."""
WAIT_S = 400.0
"""When a start that records nothing and does not end is a difference of its own."""
POINTS = (  # A rank of which, where it is killed.
    ("last", "embark.run.checkpointer:Checkpointer.begin", ""),
    ("last", "embark.store.checkpoint_store:ChecksumWriter.write", "rank-"),
    ("first", "embark.store.checkpoint_store:ChecksumWriter.write", "index.json"),
    ("first", "embark.store.checkpoint_store:CheckpointStore.commit", ""),
    ("first", "embark.run.checkpointer:Checkpointer._clean_up", ""),
    ("first", "embark.store.checkpoint_store:CheckpointStore.remove", ""),
    ("last", "embark.run.checkpointer:Checkpointer.load_newest", ""),
    ("first", "embark.run.evaluation:Evaluation.run", ""),
)


class Stopped(Exception):
    """Another round has found what was looked for."""


class Round:
    """One run, disturbed again and again."""

    stopping = threading.Event()

    def __init__(self, case: Case, run: Run, rng: random.Random, plant: str, proxy: Proxy | None, env: dict[str, str],
                 result: Result) -> None:
        self.case, self.run, self.rng, self.plant, self.proxy, self.env, self.result = (
            case, run, rng, plant, proxy, env, result)
        self.is_record_complete = True

    def start(self, fault: str = "", **words: Any) -> Ranks:
        if self.stopping.is_set():
            raise Stopped
        self.offset = self._size()
        return self.run.start(self.case.num_ranks, *self.case.sets, env={**self.env, **LEASE}, hook=HOOK,
                              plant=self.plant, fault=fault, options=words)

    def play(self) -> None:
        faults: dict[str, Callable[[], None]] = {
            "kill": self.kill, "kill at a point": self.kill_at_point, "stop": self.stop, "pause": self.pause,
            "clock jump": self.clock_jump, "second writer": self.second_writer, "lost lease": self.lost_lease,
        }
        if self.case.store == "folder":
            faults |= {"full disk": self.full_disk, "slow store": self.slow_store, "cut file": self.cut_file}
        else:
            faults |= {"failing store": self.failing_store, "lost host": self.lost_host}
        for _ in range(FAULTS_A_ROUND):
            if self.is_finished():
                break
            name = self.rng.choice(list(faults))
            self.result.log.append(name)
            faults[name]()
            self.result.faults[name] += 1
        self.end()

    def end(self) -> None:
        if self.proxy:
            self.proxy.fault = lambda method, path: ""
        codes = self.codes(self.start())
        if set(codes) != {0}:
            raise Difference(f"the last start ended with {codes}:\n{self.tail()}")

    # Faults. Each leaves no process behind.

    def kill(self) -> None:
        ranks = self.start()
        self.wait_for_an_instant(ranks)
        victims = self.rng.sample(range(self.case.num_ranks), self.rng.randint(1, self.case.num_ranks))
        had_begun = self.num_steps() > 0
        ranks.kill(signal.SIGKILL, *victims)
        if not had_begun:
            ranks.kill(signal.SIGKILL)  # as an agent does: a rank may wait for one that never joins
        self.ended(ranks, {0, 70, -9})

    def kill_at_point(self) -> None:
        which, method, word = self.rng.choice(POINTS)
        victim = 0 if which == "first" else self.case.num_ranks - 1
        ranks = self.start("die_in", victim=victim, method=method, word=word)
        self.ended(ranks, {0, 70, -9})

    def cut_file(self) -> None:
        victim = self.case.num_ranks - 1
        self.ended(self.start("die_writing", victim=victim, word=f"rank-{victim:05d}"), {0, 70, -9})

    def stop(self) -> None:
        ranks = self.start()
        self.wait_for_an_instant(ranks)
        had_begun = self.num_steps() > 0
        ranks.kill(number := self.rng.choice([signal.SIGTERM, signal.SIGUSR1, signal.SIGINT]))
        # Before the first step, a rank may not listen yet, and the others wait for it in vain.
        self.ended(ranks, {0, 75, 130} if had_begun else {0, 70, 75, 130, -number})

    def pause(self) -> None:
        ranks = self.start()
        self.wait_for_an_instant(ranks)
        victims = self.rng.sample(range(self.case.num_ranks), self.rng.randint(1, self.case.num_ranks))
        ranks.kill(signal.SIGSTOP, *victims)
        time.sleep(self.rng.uniform(0.05, 1.0))
        ranks.kill(signal.SIGCONT, *victims)
        self.some_steps(ranks)
        ranks.kill(signal.SIGKILL)
        self.ended(ranks, {0, -9})

    def full_disk(self) -> None:
        ranks = self.start("full_disk", first_write=self.rng.randint(1, 20), num_writes=self.rng.randint(1, 12))
        self.some_steps(ranks)
        ranks.kill(signal.SIGTERM)
        self.ended(ranks, {0, 70, 75})

    def slow_store(self) -> None:
        ranks = self.start("slow", method="embark.store.object_store:LocalStore.write", word="step-", seconds=0.05,
                           mark=str(self.run.directory / "mark"))
        self.some_steps(ranks)
        ranks.kill(self.rng.choice([signal.SIGTERM, signal.SIGKILL]))
        self.ended(ranks, {0, 75, -9})

    def failing_store(self) -> None:
        assert self.proxy
        self.proxy.fail(self.rng.choice(["503", "429", "reset", "lost", "cut"]), self.rng.randint(1, 6))
        ranks = self.start("hasty", **HASTY)
        self.some_steps(ranks)
        self.proxy.fail(self.rng.choice(["503", "reset", "lost"]), self.rng.randint(1, 20), "PUT")
        self.some_steps(ranks)
        ranks.kill(self.rng.choice([signal.SIGTERM, signal.SIGKILL]))
        self.ended(ranks, {0, 70, 75, -9})
        self.proxy.fault = lambda method, path: ""

    def lost_host(self) -> None:
        self.kill()
        shutil.rmtree(self.run.cache or "", ignore_errors=True)
        self.is_record_complete = False  # events since the last save were on that host

    def clock_jump(self) -> None:
        ranks = self.start("clock_jump", seconds=self.rng.choice([-1, 1]) * self.rng.uniform(60, 3 * 86_400))
        self.some_steps(ranks)
        ranks.kill(self.rng.choice([signal.SIGTERM, signal.SIGKILL]))
        self.ended(ranks, {0, 75, -9})

    def second_writer(self) -> None:
        first = self.start()
        self.wait_for_an_instant(first)
        second = self.start()
        until = time.monotonic() + WAIT_S
        while first.are_up() and second.are_up() and time.monotonic() < until:
            time.sleep(0.01)
        ended = [one for one in (first, second) if not one.are_up()]
        codes = [set(self.codes(one)) for one in ended]
        if {64} not in codes and not self.is_finished():
            raise Difference(f"a second writer ended with {codes} beside the first:\n{self.tail()}")
        for owner in (one for one in (first, second) if one not in ended):
            self.some_steps(owner)
            owner.kill(signal.SIGKILL)
            self.ended(owner, {0, 64, -9} if self.is_finished() else {0, -9})

    def lost_lease(self) -> None:
        first = self.start()
        self.some_steps(first)
        if not first.are_up():
            return
        first.kill(signal.SIGSTOP)
        second = self.start()
        self.some_steps(second)
        first.kill(signal.SIGCONT)
        codes = self.codes(first)
        if set(codes) - {64, 70}:  # 70: its ranks had waited for each other for too long
            raise Difference(f"a writer whose lease was taken ended with {codes}:\n{self.tail()}")
        self.some_steps(second)
        second.kill(signal.SIGKILL)
        self.ended(second, {0, -9})

    # Waiting, by what a run does.

    def wait_for_an_instant(self, ranks: Ranks) -> None:
        delay_s = self.rng.uniform(0.0, 0.05)
        if self.rng.random() < 0.25:
            delay_s = self.rng.uniform(0.0, 1.0)
        else:
            self.some_steps(ranks)
        time.sleep(delay_s)

    def some_steps(self, ranks: Ranks) -> None:
        wanted, until = self.rng.randint(1, 8), time.monotonic() + WAIT_S
        while self.num_steps() < wanted and ranks.are_up():
            if time.monotonic() > until:
                ranks.kill(signal.SIGKILL)
                raise Difference(f"no step in {WAIT_S:.0f} s:\n{self.tail()}")
            time.sleep(0.01)

    def num_steps(self) -> int:
        """Of this start."""
        path = self.run.path / "events.jsonl"
        try:
            with path.open("rb") as file:
                file.seek(min(self.offset, self._size()))
                return file.read().count(b'"event": "step"')
        except FileNotFoundError:
            return 0

    def _size(self) -> int:
        path = self.run.path / "events.jsonl"
        return path.stat().st_size if path.exists() else 0

    def codes(self, ranks: Ranks) -> list[int]:
        """How each ended, once all have, however slow the machine is."""
        size, until = -1, 0.0
        while ranks.are_up():
            if self._size() != size:
                size, until = self._size(), time.monotonic() + WAIT_S
            if time.monotonic() > until:
                ranks.kill(signal.SIGKILL)
                raise Difference(f"neither an event nor an end in {WAIT_S:.0f} s:\n{self.tail()}")
            time.sleep(0.01)
        return ranks.codes()

    def ended(self, ranks: Ranks, allowed: set[int]) -> None:
        codes = self.codes(ranks)
        if not set(codes) <= allowed:
            raise Difference(f"ranks ended with {codes}, not with {sorted(allowed)}:\n{self.tail()}")

    def is_finished(self) -> bool:
        return any(e.get("outcome") == "done" for e in self.run.events("end"))

    def tail(self) -> str:
        return "\n".join(self.run.output().splitlines()[-25:])
