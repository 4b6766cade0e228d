"""Ranks that are killed, signalled and starved: forked by a zygote, joined by gloo."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from integration.faults.zygote import free_port
from limits import HANG_S

TESTS = Path(__file__).parents[2]
SPEC = """
name = "run"
[model]
num_dense = 4
embedding_dim = 64
bottom_mlp = [16]
top_mlp = [16]
[[model.tables]]
name = "user"
rows = 301
[[model.tables]]
name = "item"
rows = 100
multi_hot = 3
pooling = "mean"
[[model.tables]]
name = "shop"
rows = 7
[data]
num_train_samples = 4096
num_eval_samples = 96
ragged = true
[train]
batch_size = 48
num_steps = 12
num_epochs = 100
learning_rate = 0.05
dense_optimizer = "adam"
precision = "fp32"
[place]
device = "cpu"
timeout_s = 20
[store]
checkpoint_every = 5
[watch]
every = 1
tensorboard = false
"""
# All that a run would import by itself; torch.distributed.optim is compiled as it is, which takes half a second.
BOTH = ("embark.__main__", "embark.cli.train", "embark.run.loop", "embark.events.sinks.terminal",
        "embark.data.synthetic", "embark.data.workers", "embark.report.report", "warm_caches")
TORCH = (*BOTH, "embark.trainers.torch.trainer", "torch.distributed.checkpoint", "torch.distributed.optim")
JAX = (*BOTH, "embark.trainers.jax.trainer")
KIB_FOR_TWO = 1100
"""A checkpoint of this run takes 420 KiB; the third is written before the first is removed."""


class Zygote:
    """Starts ranks, and knows how those that ended ended."""

    def __init__(self, modules: tuple[str, ...] = TORCH, **settings: str) -> None:
        env = {k: v for k, v in os.environ.items() if not k.startswith(("COV", "GCE_", "AWS_"))}
        env |= {"OMP_NUM_THREADS": "1", "AWS_EC2_METADATA_DISABLED": "true", **settings}
        paths = [str(TESTS), str(TESTS / "support"), str(TESTS.parent / "src"), *filter(None, [env.get("PYTHONPATH")])]
        self._process = subprocess.Popen([sys.executable, str(Path(__file__).parent / "zygote.py"), *modules],
                                         stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                         env={**env, "PYTHONPATH": os.pathsep.join(paths)})
        self._pending = b""
        self._pids: list[list[int]] = []
        self._codes: dict[int, int] = {}
        self._listen(lambda: bool(self._pids))
        self._pids.clear()

    def fork(self, num_ranks: int, words: list[str], *, cwd: Path, log: Path, env: dict[str, str] | None = None,
             hook: str = "", **hook_words: Any) -> list[int]:
        """Start ranks of `embark WORDS`; `hook` is a `module:function` called in each with its rank first."""
        request = {"num_ranks": num_ranks, "words": words, "cwd": str(cwd), "log": str(log), "env": env or {},
                   "hook": hook, "hook_words": hook_words, "port": free_port()}
        self._process.stdin.write(json.dumps(request).encode() + b"\n")
        self._process.stdin.flush()
        self._listen(lambda: bool(self._pids))
        return self._pids.pop()

    def code(self, pid: int, within_s: float = 0.0) -> int | None:
        """How a rank ended; None where it has not."""
        self._listen(lambda: pid in self._codes, within_s)
        return self._codes.get(pid)

    def close(self) -> None:
        self._process.stdin.close()
        self._process.wait(HANG_S)
        self._process.stdout.close()

    def _listen(self, is_enough: Callable[[], bool], within_s: float = HANG_S) -> None:
        until = time.monotonic() + within_s
        while not is_enough():
            left = until - time.monotonic()
            if not select.select([self._process.stdout], [], [], max(left, 0.0))[0]:
                return
            data = os.read(self._process.stdout.fileno(), 65536)
            if not data:
                raise RuntimeError("the zygote ended")
            *lines, self._pending = (self._pending + data).split(b"\n")
            for payload in map(json.loads, lines):
                if "pids" in payload:
                    self._pids.append(payload["pids"])
                    for pid in payload["pids"]:
                        self._codes.pop(pid, None)  # of an earlier process of that number
                else:
                    self._codes[payload["pid"]] = payload["code"]


@dataclass
class Ranks:
    """Ranks of one start of a run."""

    zygote: Zygote
    pids: list[int]
    run: Run

    def kill(self, number: int, *ranks: int) -> None:
        """Send a signal to these ranks, or to all."""
        for rank in ranks or range(len(self.pids)):
            if self.zygote.code(self.pids[rank]) is None:
                os.kill(self.pids[rank], number)

    def codes(self, within_s: float = HANG_S) -> list[int]:
        """How each ended, once all have. What has not in time is killed, and the test fails."""
        until = time.monotonic() + within_s
        codes = [self.zygote.code(pid, max(until - time.monotonic(), 0.0)) for pid in self.pids]
        if None in codes:
            self.kill(signal.SIGKILL)
            raise AssertionError(f"not ended after {within_s} s: {codes}\n{self.run.output()}")
        return codes

    def are_up(self) -> bool:
        return any(self.zygote.code(pid) is None for pid in self.pids)

    def until(self, happened: Callable[[], bool], within_s: float = HANG_S) -> None:
        """Wait for something that a running rank does."""
        end = time.monotonic() + within_s
        while not happened():
            if time.monotonic() > end or not self.are_up():
                raise AssertionError(f"did not come to pass: {self.codes(0)}\n{self.run.output()}")
            time.sleep(0.005)


@dataclass
class Run:
    """A run's directory, and the ranks that are started in it again and again."""

    zygote: Zygote
    directory: Path
    name: str = "run"
    root: str = ""
    sets: tuple[str, ...] = ()
    cache: Path | None = None
    """Where a run behind a uri has its small files: the EMBARK_CACHE of the ranks that are started next."""
    started: list[Ranks] = field(default_factory=list)

    @property
    def path(self) -> Path:
        if self.cache:
            return next(self.cache.glob(f"runs/*/{self.name}"), self.cache / "nothing yet")
        return Path(self.root or self.directory) / self.name

    def start(self, num_ranks: int, *sets: str, env: dict[str, str] | None = None, hook: str = "",
              flags: tuple[str, ...] = (), **hook_words: Any) -> Ranks:
        spec = self.directory / "spec.toml"
        if not spec.exists():
            spec.write_text(SPEC)
        every = (f"store.root={self.root or self.directory}", f"name={self.name}", *self.sets, *sets)
        env = {**(env or {}), **({"EMBARK_CACHE": str(self.cache)} if self.cache else {})}
        words = ["train", str(spec), *flags, *(word for one in every for word in ("--set", one))]
        pids = self.zygote.fork(num_ranks, words, cwd=self.directory, log=self.directory / f"{self.name}.log",
                                env=env, hook=hook, **hook_words)
        ranks = Ranks(self.zygote, pids, self)
        self.started.append(ranks)
        return ranks

    def ends(self, num_ranks: int, *sets: str, **more: Any) -> list[int]:
        """Start it and wait for the end."""
        return self.start(num_ranks, *sets, **more).codes()

    def output(self) -> str:
        """All that all ranks ever said."""
        return "".join(f"--- {log.name}\n{log.read_text(errors='replace')}"
                       for log in sorted(self.directory.glob(f"{self.name}.log.*")))

    def events(self, *kinds: str) -> list[dict[str, Any]]:
        """Whole lines only; the last may be being written."""
        path = self.path / "events.jsonl"
        found = []
        for line in path.read_text().splitlines() if path.exists() else []:
            try:
                found.append(json.loads(line))
            except ValueError:
                continue
        return [e for e in found if not kinds or e["event"] in kinds]

    def losses(self) -> dict[int, list[float]]:
        """By step: each time it was told."""
        values: dict[int, list[float]] = {}
        for event in self.events("step"):
            values.setdefault(event["step"], []).append(event["loss"])
        return values

    def last_step(self) -> int:
        return max((e["step"] for e in self.events("step")), default=0)

    def committed(self) -> list[int]:
        return sorted(int(mark.parent.name[5:]) for mark in self.path.glob("checkpoints/step-*/commit.json"))

    def unfinished(self) -> list[int]:
        """Steps with files and no mark."""
        folders = [f for f in self.path.glob("checkpoints/step-*") if not (f / "commit.json").exists()]
        return sorted(int(folder.name[5:]) for folder in folders)

    def warnings(self) -> str:
        return "\n".join(e["text"] for e in self.events("note") if e["level"] == "warning")


@pytest.fixture(scope="session")
def jax_zygote(tmp_path_factory) -> Iterator[Zygote]:
    """Each process that it forks has two devices. What the first compiles the others need not."""
    made = Zygote(JAX, JAX_NUM_CPU_DEVICES="2", JAX_DISABLE_MOST_OPTIMIZATIONS="1",
                  JAX_COMPILATION_CACHE_DIR=str(tmp_path_factory.mktemp("programs")),
                  JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS="0", JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES="-1")
    yield made
    made.close()


@pytest.fixture
def run(zygote, tmp_path) -> Iterator[Run]:
    """A run in this test's own directory."""
    made = Run(zygote, tmp_path)
    yield made
    end_all(made)


def end_all(run: Run) -> None:
    for ranks in run.started:
        ranks.kill(signal.SIGKILL)


@pytest.fixture(scope="session")
def undisturbed(zygote, tmp_path_factory) -> Run:
    """The run of two ranks that nothing disturbed."""
    made = Run(zygote, tmp_path_factory.mktemp("undisturbed"))
    assert made.ends(2) == [0, 0], made.output()
    return made


@pytest.fixture
def disk(tmp_path) -> Iterator[Path]:
    """A file system of its own, small and truly full when it is."""
    where = tmp_path / "disk"
    where.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={KIB_FOR_TWO}k", "tmpfs", str(where)]
    mounted = subprocess.run(mount, capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"only root may mount a small disk: {mounted.stderr.strip()}")
    yield where
    subprocess.run(["umount", "--lazy", str(where)], check=True)
