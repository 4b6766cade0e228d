"""A run that follows a folder that grows, killed again and again, beside the same run on its good records alone."""

from __future__ import annotations

import json
import random
import signal
import time
from pathlib import Path

from exported_runs import EditedRun
from integration.faults.conftest import Ranks, Run, Zygote
from serving_soak_place import NUM_IDS
from soak_comparison import Difference

from embark.spec import to_toml

BATCH, NUM_STEPS, BOUND_S, LIMIT_S = 32, 60, 20.0, 120.0
BAD: tuple[bytes, ...] = (
    b"", b"{", b"not JSON", b"[1, 2]", b'"text"', b"\xff\xfe", b'{"t": 1700000000}', b'{"label": 1}',
)


class FollowedRun(Run):
    """A run that `embark follow` trains."""

    def start(self, num_ranks: int = 1, *sets: str, hook: str = "", **more: object) -> Ranks:  # type: ignore[override]
        pids = self.zygote.fork(1, ["follow", str(self.directory / "spec.toml")], cwd=self.directory,
                                log=self.directory / "follow.log", hook=hook, **more)
        self.started.append(ranks := Ranks(self.zygote, pids, self))
        return ranks

    def output(self) -> str:
        log = self.directory / "follow.log.0"
        return log.read_text(errors="replace")[-3000:] if log.exists() else ""


class Follower:
    """The two runs, and the records that come one file at a time."""

    def __init__(self, zygote: Zygote, folder: Path, rng: random.Random, plant: str) -> None:
        self.rng, self.plant, self.num_kills, self._num_files = rng, plant, 0, 0
        self._rows = good_rows((NUM_STEPS + 3) * BATCH, rng)
        self.plain, self.run = (self._make(zygote, folder / name) for name in ("plain", "followed"))
        write_file(self.plain.directory / "stream" / "000000.jsonl", self._rows)
        self._plain_ranks = self.plain.start()
        self._ranks: Ranks | None = None

    @property
    def uri(self) -> str:
        return str(self.run.path)

    def _make(self, zygote: Zygote, directory: Path) -> FollowedRun:
        (directory / "stream").mkdir(parents=True)
        made = EditedRun(directory, rows=NUM_IDS, name="run", train={
            "batch_size": BATCH, "num_steps": NUM_STEPS, "learning_rate": 0.5, "precision": "fp32", "seed": 3},
            stream={"source": "files", "path": str(directory / "stream"), "time_column": "t", "bound_s": BOUND_S},
            place={"device": "cpu"}, watch={"every": 1, "tensorboard": False},
            store={"root": str(directory), "checkpoint_every": 3, "keep_checkpoints": 1000})
        (directory / "spec.toml").write_text(to_toml(made.spec))
        return FollowedRun(zygote, directory)

    def feed(self) -> None:
        """Write the next file: good records, and others between them."""
        rows, self._rows = (self._rows[:part], self._rows[part:]) if (part := self.rng.randint(20, 120)) else ([], [])
        if not rows:
            return
        lines: list[dict[str, object] | bytes] = []
        for row in rows:
            lines.append(row)
            if self.rng.random() < 0.1:
                lines.append(self.rng.choice(BAD))
            if self.rng.random() < 0.02 and self._num_files > 2:
                lines.append({**row, "t": 1.6e9})  # too late
        self._num_files += 1
        write_file(self.run.directory / "stream" / f"{self._num_files:06d}.jsonl", lines)

    def go_on(self) -> None:
        """Feed it, start it if it is down, and let it train."""
        self.feed()
        if self._ranks is None or not self._ranks.are_up():
            self._ranks = self.run.start(hook="serving_soak_hooks:disturb", plant=self.plant)

    def kill(self) -> None:
        """Kill it at any instant, and start it again."""
        self.go_on()
        if self.rng.random() < 0.5:
            time.sleep(self.rng.uniform(0.0, 0.8))
        else:
            self._some_steps()
        assert self._ranks
        self._ranks.kill(signal.SIGKILL)
        self.num_kills += 1
        if set(self._ranks.codes()) - {-9, 0}:
            raise Difference(f"the follower ended with {self._ranks.codes()}:\n{self.run.output()}")
        self.go_on()

    def committed(self) -> list[int]:
        return self.run.committed()

    def finish(self) -> None:
        """Let it train the rest, and compare it with the run on the good records."""
        while self._rows:
            self.go_on()
        self.go_on()
        for one, ranks in ((self.plain, self._plain_ranks), (self.run, self._ranks)):
            assert ranks
            if ranks.codes(LIMIT_S) != [0]:
                raise Difference(f"a follower ended with {ranks.codes()}:\n{one.output()}")
        told = [{event["step"]: (event["loss"], event["auc"]) for event in one.events("step")}
                for one in (self.plain, self.run)]
        if told[0] != told[1]:
            first = min(step for step in told[0].keys() | told[1] if told[0].get(step) != told[1].get(step))
            raise Difference(f"step {first} of the follower: loss and AUC {told[1].get(first)} instead of "
                             f"{told[0].get(first)} of the run on the good records")
        for step, losses in self.run.losses().items():
            if set(losses) != {told[0][step][0]}:
                raise Difference(f"step {step} of the follower was another one once: {losses}")

    def end(self) -> None:
        for run in (self.plain, self.run):
            for ranks in run.started:
                ranks.kill(signal.SIGKILL)

    def _some_steps(self) -> None:
        """Wait until it has trained, or for so long that it has nothing to train on."""
        last, until = self.run.last_step(), time.monotonic() + 5.0
        while self.run.last_step() == last and time.monotonic() < until and self._ranks and self._ranks.are_up():
            time.sleep(0.01)


def good_rows(num: int, rng: random.Random) -> list[dict[str, object] | bytes]:
    """One a second, up to the bound out of order; some come twice, and are two records."""
    made: list[dict[str, object] | bytes] = []
    for second in range(num):
        if made and rng.random() < 0.05:
            made.append({**json.loads(json.dumps(made[-1]))})
            continue
        a = rng.randrange(NUM_IDS)
        made.append({"t": 1.7e9 + second - rng.uniform(0, BOUND_S), "label": int(rng.random() < 0.1 + 0.4 * (a % 2)),
                     "a": a, "b": rng.randrange(3), "dense_0": rng.gauss(0, 1), "dense_1": rng.gauss(0, 1)})
    return made


def write_file(path: Path, lines: list[dict[str, object] | bytes]) -> None:
    scratch = path.with_name(f".{path.name}")
    scratch.write_bytes(b"".join((line if isinstance(line, bytes) else json.dumps(line).encode()) + b"\n"
                                 for line in lines))
    scratch.rename(path)
