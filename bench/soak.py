"""Random runs under random faults: after each round, losses, checkpoints and events are those of the undisturbed run.

    .venv/bin/python bench/soak.py --seed 1 --rounds 200 --jobs 2
    .venv/bin/python bench/soak.py --seed 1 --round 17          # one round again
    .venv/bin/python bench/soak.py --seed 1 --plant early_mark  # does it find a defect? ends at the first difference

A round draws a model, ranks, an engine, a store and data from the seed, trains it undisturbed, then again under some
ten faults, one a start: kill, stop, pause, full disk, slow and failing store, clock jump, lost host, lost lease, second
writer.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "tests"), str(Path(__file__).parent)]

from integration.cloud.emulators import s3, s3_env  # noqa: E402
from integration.cloud.faulty_proxy import Proxy, proxy_to  # noqa: E402
from integration.faults.conftest import JAX, TORCH, Ranks, Run, Zygote  # noqa: E402
from prepared_rows import make_prepared  # noqa: E402
from soak_hooks import PLANTS  # noqa: E402

from embark.data.prepared import Feature  # noqa: E402
from embark.store import RunDir, run_uri  # noqa: E402
from embark.store.checkpoint_arrays import CheckpointArrays  # noqa: E402

HOOK = "soak_hooks:disturb"
FAULTS_A_ROUND = 12
HASTY = {"max_retries": 9, "first_wait_s": 0.02, "longest_wait_s": 0.1, "give_up_s": 60}
LEASE = {"EMBARK_LEASE_S": "2"}
WAIT_S = 120.0
"""When a start that neither trains nor ends is a difference of its own."""
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


class Difference(AssertionError):
    """The disturbed run is not the undisturbed one."""


@dataclass(frozen=True)
class Case:
    """What a round trains."""

    trainer: str  # torch or jax
    num_ranks: int
    store: str  # folder or bucket
    data: str
    sets: tuple[str, ...]
    spec: str

    def __str__(self) -> str:
        return f"{self.trainer}, {self.num_ranks} ranks, {self.store}, {self.data} data"


@dataclass
class Result:
    number: int
    case: str = ""
    faults: Counter[str] = field(default_factory=Counter)
    num_steps_compared: int = 0
    num_steps_again: int = 0
    num_tensors: int = 0
    difference: str = ""
    log: list[str] = field(default_factory=list)


def draw_case(rng: random.Random, trainers: list[str], stores: list[str], folder: Path) -> Case:
    trainer, store = rng.choice(trainers), rng.choice(stores)
    num_ranks = rng.choice([1, 2, 2, 3]) if trainer == "torch" else 1
    data = rng.choice(["synthetic", "prepared", "columns"])
    kind, num_dense, dim = rng.choice(["dlrm", "dcnv2"]), rng.choice([0, 3, 8]), rng.choice([8, 16, 64])
    if kind == "dlrm" and not num_dense:
        num_dense = 2
    tables = [Feature(f"t{i}", rng.choice([7, 100, 301]), multi_hot=hot, is_ragged=hot > 1 and data != "columns")
              for i in range(rng.randint(1, 4)) for hot in [rng.choice([1, 1, 3]) if data != "columns" else 1]]
    batch = 12 * rng.randint(1, 4)
    steps = rng.randint(70, 110)
    keep = rng.randint(1, 3)
    spec = [
        'name = "run"', "[model]", f'kind = "{kind}"', f"num_dense = {num_dense}", f"embedding_dim = {dim}",
        "bottom_mlp = [16]", "top_mlp = [16]", "cross_rank = 8", "num_cross_layers = 2",
        *(f'[[model.tables]]\nname = "{t.name}"\nrows = {t.rows}\nmulti_hot = {t.multi_hot}\n'
          f'pooling = "{rng.choice(["sum", "mean"])}"' for t in tables),
        "[data]", "num_train_samples = 1024", f"num_eval_samples = {rng.choice([0, 96])}",
        f"ragged = {str(data == 'synthetic').lower()}", f"seed = {rng.randint(0, 99)}",
        "[train]", f"batch_size = {batch}", f"num_steps = {steps}", "num_epochs = 100",
        f"learning_rate = {0.05 if kind == 'dlrm' else 1e-5}",
        f'optimizer = "{rng.choice(["sgd", "adagrad", "rowwise_adagrad"])}"',
        f'dense_optimizer = "{rng.choice(["sgd", "adagrad", "adam"])}"', 'precision = "fp32"',
        f"seed = {rng.randint(0, 99)}", f'decay = "{rng.choice(["none", "cosine"])}"', "warmup_steps = 5",
        f"eval_every = {rng.choice([0, 15])}",
        "[place]", f'device = "{"cpu" if trainer == "torch" else "jax"}"', "timeout_s = 20",
        "[store]", f"checkpoint_every = {rng.randint(2, 6)}", f"keep_checkpoints = {keep}",
        f"in_background = {str(rng.random() < 0.7).lower()}", "[watch]", "every = 1", "tensorboard = false",
    ]
    sets: tuple[str, ...] = ()
    if data == "prepared":
        make_prepared(folder / "data", tuple(tables), train=600, validation=96, num_dense=num_dense)
        sets = ("data.kind=prepared", f"data.path={folder / 'data'}")
    elif data == "columns":
        write_csv(folder / "rows.csv", tables, num_dense, rng)
        names = json.dumps([f"d{i}" for i in range(num_dense)])
        sets = ("data.kind=columns", f"data.path={folder / 'rows.csv'}", f"data.dense_columns={names}")
    return Case(trainer, num_ranks, store, data, sets, "\n".join(spec) + "\n")


def write_csv(path: Path, tables: list[Feature], num_dense: int, rng: random.Random) -> None:
    columns = ["label", *(f"d{i}" for i in range(num_dense)), *(t.name for t in tables)]
    rows = ([rng.randint(0, 1), *(round(rng.random(), 4) for _ in range(num_dense)),
             *(rng.randrange(t.rows) for t in tables)] for _ in range(700))
    path.write_text("\n".join(",".join(map(str, row)) for row in [columns, *rows]) + "\n")


class Round:
    """One run, disturbed again and again."""

    def __init__(self, case: Case, run: Run, rng: random.Random, plant: str, proxy: Proxy | None, env: dict[str, str],
                 result: Result) -> None:
        self.case, self.run, self.rng, self.plant, self.proxy, self.env, self.result = (
            case, run, rng, plant, proxy, env, result)
        self.is_record_complete = True

    def start(self, fault: str = "", **words: Any) -> Ranks:
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
        codes = self.start().codes(WAIT_S)
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
        ranks = self.start("slow", method="embark.store.local_store:LocalStore.write", word="step-", seconds=0.05,
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
        codes = [set(one.codes(WAIT_S)) for one in ended]
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
        codes = first.codes(WAIT_S)
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

    def ended(self, ranks: Ranks, allowed: set[int]) -> None:
        codes = ranks.codes(WAIT_S)
        if not set(codes) <= allowed:
            raise Difference(f"ranks ended with {codes}, not with {sorted(allowed)}:\n{self.tail()}")

    def is_finished(self) -> bool:
        return any(e.get("outcome") == "done" for e in self.run.events("end"))

    def tail(self) -> str:
        return "\n".join(self.run.output().splitlines()[-25:])


def compare(plain: Run, disturbed: Round, env: dict[str, str]) -> None:
    """Losses, evaluations, the order of events, and every byte of the checkpoints that are left."""
    run, result = disturbed.run, disturbed.result
    expected, found = plain.losses(), run.losses()
    if disturbed.is_record_complete and sorted(found) != sorted(expected):
        raise Difference(f"steps {sorted(set(expected) ^ set(found))} are in one of the records only")
    for step, losses in found.items():
        result.num_steps_compared += len(losses)
        result.num_steps_again += len(losses) - 1
        if set(losses) != set(expected[step]):
            raise Difference(f"step {step}: loss {losses} instead of {expected[step]}")
    names = ("log_loss", "auc", "normalized_entropy")
    evals = [{e["step"]: [e[name] for name in names] for e in one.events("eval")} for one in (plain, run)]
    if any(evals[0][step] != values for step, values in evals[1].items()):
        raise Difference(f"evaluations {evals[1]} instead of {evals[0]}")
    check_events(run)
    left, found_left = final_arrays(plain), final_arrays(run)
    if max(left) != max(found_left):
        raise Difference(f"the last checkpoint is {max(found_left)} instead of {max(left)}")
    for name in left.keys() & found_left.keys():  # one that was stopped keeps others, too
        result.num_tensors += len(left[name])
        if left[name] != found_left[name]:
            other = [k for k in left[name].keys() | found_left[name] if left[name].get(k) != found_left[name].get(k)]
            raise Difference(f"{name} differs in {sorted(other)[:5]}")


def check_events(run: Run) -> None:
    """Each start begins at the newest checkpoint there was, and takes the steps in order."""
    saved, step = 0, 0
    for event in run.events("start", "step", "save", "note"):
        if event["event"] == "start":
            step = event["first_step"]
            if step < saved:
                raise Difference(f"resumed at step {step}, and step {saved} had been saved")
        elif event["event"] == "step":
            if event["step"] != step + 1:
                raise Difference(f"step {event['step']} after step {step}")
            step = event["step"]
        elif event["event"] == "save":
            saved = max(saved, event["step"])
        elif "is damaged" in event["text"]:
            raise Difference(event["text"])


def final_arrays(run: Run) -> dict[str, dict[str, str]]:
    """A digest of every tensor of every checkpoint that is left."""
    checkpoints = RunDir(run_uri(run.root or str(run.directory), run.name)).checkpoints
    if left := checkpoints.unfinished():
        raise Difference(f"unfinished checkpoints are left: {left}")
    opened = {one.name: CheckpointArrays(checkpoints.store, one.name) for one in checkpoints.committed()}
    return {folder: {name: hashlib.sha256(arrays.tensor(name, entry.size).tobytes()).hexdigest()
                     for name, entry in arrays.entries.items()} for folder, arrays in opened.items()}


class Worker(threading.local):
    """What a thread keeps from round to round."""

    def __init__(self) -> None:
        self.zygotes: dict[str, Zygote] = {}

    def zygote(self, trainer: str) -> Zygote:
        kind = "jax" if trainer == "jax" else "torch"
        if kind not in self.zygotes:
            settings = {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])}
            if kind == "jax":
                settings |= {"JAX_NUM_CPU_DEVICES": "2", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1", "JAX_PLATFORMS": "cpu"}
            else:
                settings |= {"CUDA_VISIBLE_DEVICES": ""}
            self.zygotes[kind] = Zygote(JAX if kind == "jax" else TORCH, **settings)
        return self.zygotes[kind]


WORKER = Worker()


def play(number: int, seed: int, trainers: list[str], stores: list[str], plant: str, s3_port: int) -> Result:
    rng, result = random.Random(f"{seed}/{number}"), Result(number)
    folder = Path(tempfile.mkdtemp(prefix="embark-soak-"))
    started: list[Run] = []
    try:
        with ExitStack() as stack:
            case = draw_case(rng, trainers, stores, folder)
            result.case = str(case)
            proxy = stack.enter_context(proxy_to(s3_port)) if case.store == "bucket" else None
            env = s3_env(proxy.port) if proxy else {}
            for name in ("plain", "disturbed"):
                (folder / name).mkdir()
                (folder / name / "spec.toml").write_text(case.spec)
                started.append(Run(WORKER.zygote(case.trainer), folder / name,
                                   root=f"s3://models/{folder.name}/{name}" if proxy else "",
                                   cache=folder / name / "cache" if proxy else None))
            plain, run = started
            if (codes := plain.ends(case.num_ranks, *case.sets, env=env)) != [0] * case.num_ranks:
                raise Difference(f"the undisturbed run ended with {codes}:\n{plain.output()[-3000:]}")
            round_ = Round(case, run, rng, plant, proxy, env, result)
            round_.play()
            compare(plain, round_, env)
    except Exception as error:
        result.difference = str(error) if isinstance(error, AssertionError) else traceback.format_exc()
    finally:
        for run in started:
            for ranks in run.started:
                ranks.kill(signal.SIGCONT)
                ranks.kill(signal.SIGKILL)
    if result.difference:
        result.log.append(f"its files: {folder}")
    else:
        shutil.rmtree(folder, ignore_errors=True)
    return result


def rounds(args: argparse.Namespace, s3_port: int) -> Iterator[Result]:
    numbers = [args.round] if args.round >= 0 else range(args.rounds)
    with ThreadPoolExecutor(args.jobs) as pool:
        pending = [pool.submit(play, number, args.seed, args.trainers.split(","), args.stores.split(","), args.plant,
                               s3_port) for number in numbers]
        for future in as_completed(pending):
            result = future.result()
            yield result
            if args.plant and result.difference:
                for left in pending:
                    left.cancel()
                return


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--round", type=int, default=-1, help="play this one only")
    parser.add_argument("--jobs", type=int, default=2, help="rounds at the same time")
    parser.add_argument("--trainers", default="torch,torch,torch,jax", help="of torch, jax; drawn evenly")
    parser.add_argument("--stores", default="folder,folder,bucket", help="of folder, bucket; drawn evenly")
    parser.add_argument("--plant", default="", choices=["", *PLANTS], help="a defect to plant in every rank")
    args = parser.parse_args()
    began, total, differing, num_rounds = time.monotonic(), Result(-1), [], 0
    with ExitStack() as stack:
        s3_port = stack.enter_context(s3()).port if "bucket" in args.stores else 0
        os.environ.update(s3_env(s3_port))
        for result in rounds(args, s3_port):
            total.faults.update(result.faults)
            num_rounds += 1
            total.num_steps_compared += result.num_steps_compared
            total.num_steps_again += result.num_steps_again
            total.num_tensors += result.num_tensors
            if result.difference:
                differing.append(result.number)
                print(f"round {result.number} ({result.case}) differs after {', '.join(result.log)}:\n"
                      f"{result.difference}\n  again: bench/soak.py --seed {args.seed} --round {result.number}",
                      flush=True)
            if not num_rounds % 20:
                print(f"{num_rounds} rounds, {total.faults.total()} faults, {time.monotonic() - began:.0f} s",
                      flush=True)
    print(f"seed {args.seed}: {num_rounds} rounds, {total.faults.total()} faults "
          f"({', '.join(f'{n} {name}' for name, n in total.faults.most_common())}), "
          f"{total.num_steps_compared:,} steps compared ({total.num_steps_again:,} of them trained again), "
          f"{total.num_tensors:,} tensors compared, {len(differing)} rounds differed"
          f"{': ' + str(sorted(differing)) if differing else ''}; {time.monotonic() - began:.0f} s")
    return bool(differing)


if __name__ == "__main__":
    sys.exit(main())
