"""Versions, publishers, followers and servers under random faults: each answer is that of the version it names.

    .venv/bin/python bench/serving_soak.py --seed 1 --rounds 40 --jobs 2
    .venv/bin/python bench/serving_soak.py --seed 1 --round 17            # one round again
    .venv/bin/python bench/serving_soak.py --seed 1 --plant all          # does it find defects?

A round draws a place (a folder or a bucket), a server of one or two processes, and some thirty actions: versions and
deltas, publishing with a gate, rollbacks, retention, places that are wiped and written again, damaged files, two
publishers at once, kills of each process, SIGTERM with requests in flight, and a run that follows a stream. Clients ask
all the time, a thousand rows a request; the scores of each checkpoint are known from an export of its own.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack, contextmanager
from pathlib import Path
from queue import Empty, SimpleQueue

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "support"), str(Path(__file__).parent)]
os.environ.setdefault("OMP_NUM_THREADS", "1")

from integration.cloud.emulators import s3, s3_env  # noqa: E402
from integration.faults.conftest import TORCH, Zygote  # noqa: E402
from serving_soak_hooks import PLANTS, plant_defect  # noqa: E402
from serving_soak_round import ACTIONS_A_ROUND, Counts, Round, Stopped  # noqa: E402

SERVING = ("embark.serve.server", "embark.cli.serve", "embark.trainers.torch.scoring.open_model", "embark.cli.publish",
           "embark.publish.publisher", "embark.cli.export", "embark.export.export_run", "embark.data.stream.source",
           "embark.data.stream.files_reader", "pandas", "torch._dynamo.utils")
ZYGOTES: SimpleQueue[Zygote] = SimpleQueue()  # Those that no round uses.


@contextmanager
def a_zygote() -> Iterator[Zygote]:
    """Use one of an earlier round, or start one."""
    try:
        zygote = ZYGOTES.get_nowait()
    except Empty:
        here = Path(__file__).parent
        path = os.pathsep.join([str(here), str(here / "planted"), os.environ.get("PYTHONPATH", "")])
        zygote = Zygote((*TORCH, *SERVING), PYTHONPATH=path, CUDA_VISIBLE_DEVICES="")
    yield zygote
    ZYGOTES.put(zygote)


def play(number: int, args: argparse.Namespace, s3_port: int, plant: str) -> Counts:
    if Round.stopping.is_set():
        return Counts()
    only = args.only or (PLANTS[plant].actions if plant else "")
    rng, counts = random.Random(f"serving/{args.seed}/{number}"), Counts(number)
    folder = Path(tempfile.mkdtemp(prefix="embark-serving-soak-"))
    with a_zygote() as zygote, ExitStack() as stack:
        try:
            store, workers = rng.choice(args.stores.split(",")), rng.choice([1, 1, 2])
            tables = rng.choice(["fp32", "fp32", "int8"])
            counts.case = f"{store}, {workers} workers, {tables}"
            place = f"s3://models/{folder.name}/at" if store == "bucket" else str(folder / "at")
            round_ = Round(folder, place, rng, zygote, s3_env(s3_port) if s3_port else {}, plant, counts,
                           workers=workers, tables=tables)
            stack.callback(round_.end)
            round_.play(args.actions, only.split(",") if only else [])
        except Stopped:
            pass
        except Exception as error:
            counts.difference = str(error) if isinstance(error, AssertionError) else traceback.format_exc()
            if plant:
                Round.stopping.set()
    if counts.difference and not plant:
        counts.log.append(f"its files: {folder}")
    else:
        shutil.rmtree(folder, ignore_errors=True)
    return counts


def rounds(args: argparse.Namespace, s3_port: int, plant: str) -> Iterator[Counts]:
    """Play rounds, those with a planted defect until it is found."""
    Round.stopping.clear()
    numbers = [args.round] if args.round >= 0 else range(args.first, args.first + args.rounds)
    with ThreadPoolExecutor(args.jobs) as pool:
        for future in as_completed([pool.submit(play, number, args, s3_port, plant) for number in numbers]):
            if (result := future.result()).case:
                yield result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--first", type=int, default=0, help="the first of them: a long soak in parts")
    parser.add_argument("--round", type=int, default=-1, help="play this one only")
    parser.add_argument("--jobs", type=int, default=2, help="rounds at the same time")
    parser.add_argument("--actions", type=int, default=ACTIONS_A_ROUND, help="of a round")
    parser.add_argument("--only", default="", help="draw these actions only, such as wipe,kill_worker")
    parser.add_argument("--stores", default="folder,folder,bucket", help="of folder, bucket; drawn evenly")
    parser.add_argument("--plant", default="", help=f"defects to find, one after the other: {','.join(PLANTS)}, or all")
    parser.add_argument("--times", action="store_true", help="say how long each kind of action took")
    args = parser.parse_args()
    plants = [*PLANTS] if args.plant == "all" else args.plant.split(",")
    if unknown := {*plants} - {"", *PLANTS}:
        parser.error(f"--plant: unknown: {', '.join(sorted(unknown))}; there are {', '.join(PLANTS)}")
    is_right = True
    with ExitStack() as stack:
        os.environ["EMBARK_CACHE"] = stack.enter_context(tempfile.TemporaryDirectory(prefix="embark-serving-cache-"))
        s3_port = stack.enter_context(s3()).port if "bucket" in args.stores else 0
        os.environ.update(s3_env(s3_port) if s3_port else {})
        for plant in plants:
            take_out = plant_defect(plant) if plant else None
            num_differing = soak(args, s3_port, plant)
            if take_out:
                take_out()
                print(f"planted {plant}: {'found' if num_differing else 'not found'}", flush=True)
            is_right &= bool(num_differing) == bool(plant)
    return 0 if is_right else 1


def soak(args: argparse.Namespace, s3_port: int, plant: str) -> int:
    """Play rounds and print what happened; return how many differed."""
    began, total, differing, num_rounds = time.monotonic(), Counts(), [], 0
    for result in rounds(args, s3_port, plant):
        total.add(result)
        num_rounds += 1
        if result.difference:
            differing.append(result.number)
            again = f"--seed {args.seed} --round {result.number}{f' --plant {plant}' if plant else ''}"
            print(f"round {result.number} ({result.case}) differs after {', '.join(result.log)}:\n"
                  f"{result.difference}\n  again: bench/serving_soak.py {again}", flush=True)
        if not num_rounds % 10:
            print(f"{num_rounds} rounds, {total.num_changes} version changes, {total.kills.total()} kills, "
                  f"{total.num_wiped} wiped or reused places, {total.num_rows:,} rows, "
                  f"{time.monotonic() - began:.0f} s", flush=True)
    victims = ", ".join(f"{num} {name}" for name, num in total.kills.most_common())
    print(f"seed {args.seed}: {num_rounds} rounds, {total.actions.total()} actions, {total.num_changes:,} version "
          f"changes, {total.kills.total()} kills ({victims}), "
          f"{total.num_wiped} wiped or reused places, {total.num_rows:,} rows compared, {total.num_failed} requests "
          f"failed around kills, {total.num_lost} requests lost, {len(differing)} rounds differed"
          f"{': ' + str(sorted(differing)) if differing else ''}; {time.monotonic() - began:.0f} s", flush=True)
    if args.times:
        for name, spent_s in sorted(total.seconds.items(), key=lambda one: -one[1]):
            print(f"  {name}: {spent_s:.1f} s, {spent_s / (total.actions[name] or num_rounds):.2f} s each")
    return len(differing)


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # torch takes seconds to leave by itself; the zygotes leave with this process
