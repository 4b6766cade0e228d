"""A run that follows a folder that grows, killed again and again, beside the same run on its good records alone."""

from __future__ import annotations

import json
import random
import signal
import time
from pathlib import Path

from exported_runs import EditedRun
from integration.faults.conftest import Ranks, Run, Zygote
from malformed_records import FILES, NO_LINES, ODD_FILES, RECORDS, ROW
from serving_soak_place import NUM_IDS
from soak_comparison import Difference

from embark.spec import to_toml

BATCH, NUM_STEPS, LIMIT_S = 32, 40, 300.0
Line = dict[str, object] | bytes
MAX_ROWS = 60  # Of a file; a row comes each second, and the last ones come with the file after it.
SHUFFLE_S, BOUND_S = 20.0, 150.0


def bad_records() -> list[bytes]:
    """Records of each malformed form, with the columns of this model, which has no list and more ids."""
    found = []
    for name, record in RECORDS.items():
        try:
            row = json.loads(record)
        except (ValueError, RecursionError):
            row = None
        is_good = isinstance(row, dict) and row.keys() == ROW.keys() and (
            row["user"] == 301 or {**row, "item": ROW["item"]} == ROW)
        if name not in NO_LINES and not is_good:
            found.append(record.replace(b'"user"', b'"a"').replace(b'"shop"', b'"b"'))
    return found


BAD = bad_records()
BAD_FILES = {**FILES, **{name: data for name, (data, _) in ODD_FILES.items()}}


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
        self._later: tuple[list[Line], list[Line]] = [], []
        self._rows = good_rows((NUM_STEPS + 3) * BATCH + int(BOUND_S), rng)
        self.plain = self._make(zygote, folder / "plain", checkpoint_every=1000)
        self.run = self._make(zygote, folder / "followed", checkpoint_every=1)
        write_file(self.plain.directory / "stream" / "000000.jsonl", self._rows)
        self._plain_ranks = self.plain.start()
        self._ranks: Ranks | None = None
        while self._num_files * MAX_ROWS < 2 * BOUND_S:
            self.feed()  # else there is nothing to train on at first

    @property
    def uri(self) -> str:
        return str(self.run.path)

    def _make(self, zygote: Zygote, directory: Path, checkpoint_every: int) -> FollowedRun:
        (directory / "stream").mkdir(parents=True)
        made = EditedRun(directory, rows=NUM_IDS, name="run", train={
            "batch_size": BATCH, "num_steps": NUM_STEPS, "learning_rate": 0.5, "precision": "fp32", "seed": 3},
            stream={"source": "files", "path": str(directory / "stream"), "time_column": "t", "bound_s": BOUND_S},
            place={"device": "cpu"}, watch={"every": 1, "tensorboard": False},
            store={"root": str(directory), "checkpoint_every": checkpoint_every, "keep_checkpoints": 1000})
        (directory / "spec.toml").write_text(to_toml(made.spec))
        return FollowedRun(zygote, directory)

    def feed(self) -> None:
        """Write the next file: good records and others between them. The rest of the last file comes first: some of it
        under an earlier name, and some as new lines of the file."""
        folder, last = self.run.directory / "stream", f"{self._num_files:06d}"
        late, grown = self._later
        self._later = [], []
        if late:
            write_file(folder / f"{last}-a.jsonl", late)
        if grown:
            with (folder / f"{last}-b.jsonl").open("ab") as file:
                file.write(in_bytes(grown))
        part = self.rng.randint(20, MAX_ROWS)
        rows, self._rows = self._rows[:part], self._rows[part:]
        if not rows:
            return
        self._num_files += 1
        lines: list[Line] = []
        for row in rows:
            self.rng.choices([lines, *self._later], [8, 1, 1])[0].append(row)
            if self.rng.random() < 0.1 and self._num_files > 1:
                lines.append(self.rng.choice(BAD))
            if self.rng.random() < 0.02 and self._num_files > 5:
                lines.append({**row, "t": 1.6e9} if isinstance(row, dict) else row)  # too late
        if self._num_files > 1 and self.rng.random() < 0.5:
            name, data = self.rng.choice([*BAD_FILES.items()])
            (folder / f"{self._num_files:06d}-0-{name}").write_bytes(data)
        write_file(folder / f"{self._num_files:06d}-b.jsonl", lines)

    def go_on(self) -> None:
        """Feed it, start it if it is down, and let it train."""
        self.feed()
        if self._ranks is None or not self._ranks.are_up():
            self._ranks = self.run.start(hook="serving_soak_hooks:disturb", plant=self.plant)

    def kill(self) -> None:
        """Kill it at any instant, and start it again."""
        self.go_on()
        if self.rng.random() < 0.7:
            self._some_steps()
        time.sleep(self.rng.uniform(0.0, 0.3))
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
        while self._rows or any(self._later):
            self.feed()
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
        """Wait until it has saved a checkpoint, or for so long that it has nothing to train on."""
        before, until = self.committed()[-1:], time.monotonic() + 20.0
        while self.committed()[-1:] == before and time.monotonic() < until and self._ranks and self._ranks.are_up():
            time.sleep(0.01)


def good_rows(num: int, rng: random.Random) -> list[Line]:
    """One a second, somewhat out of order; some come twice, and are two records."""
    made: list[Line] = []
    for second in range(num):
        if made and rng.random() < 0.05:
            made.append({**json.loads(json.dumps(made[-1]))})
            continue
        a = rng.randrange(NUM_IDS)
        made.append({"t": 1.7e9 + second - rng.uniform(0, SHUFFLE_S), "label": int(rng.random() < 0.1 + 0.4 * (a % 2)),
                     "a": a, "b": rng.randrange(3), "dense_0": rng.gauss(0, 1), "dense_1": rng.gauss(0, 1)})
    return made


def in_bytes(lines: list[Line]) -> bytes:
    return b"".join((line if isinstance(line, bytes) else json.dumps(line).encode()) + b"\n" for line in lines)


def write_file(path: Path, lines: list[Line]) -> None:
    scratch = path.with_name(f".{path.name}")
    scratch.write_bytes(in_bytes(lines))
    scratch.rename(path)
