"""Versions, publishers, followers and servers under random faults: each answer is that of the version it names.

    .venv/bin/python bench/serving_soak.py --seed 1 --rounds 40 --jobs 2
    .venv/bin/python bench/serving_soak.py --seed 1 --round 17            # one round again
    .venv/bin/python bench/serving_soak.py --seed 1 --plant reused_number # does it find a defect?

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
import threading
import time
import traceback
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "support"), str(Path(__file__).parent)]
os.environ.setdefault("OMP_NUM_THREADS", "1")

from integration.cloud.emulators import s3, s3_env  # noqa: E402
from integration.faults.conftest import TORCH, Zygote  # noqa: E402
from serving_soak_hooks import PLANTS, plant_defect  # noqa: E402
from serving_soak_round import ACTIONS_A_ROUND, Counts, Round, Stopped  # noqa: E402

SERVING = ("embark.serve.server", "embark.cli.serve", "embark.trainers.torch.scoring.open_model", "embark.cli.publish",
           "embark.publish.publisher", "embark.cli.export", "embark.export.export_run")


class Worker(threading.local):
    """What a thread keeps from round to round."""

    zygote: Zygote | None = None

    def get(self, plant: str) -> Zygote:
        if self.zygote is None:
            here = Path(__file__).parent
            path = os.pathsep.join([str(here), *([str(here / "planted")] if plant else []),
                                    os.environ.get("PYTHONPATH", "")])
            self.zygote = Zygote((*TORCH, *SERVING), PYTHONPATH=path, CUDA_VISIBLE_DEVICES="")
        return self.zygote


WORKER = Worker()


def play(number: int, seed: int, stores: list[str], plant: str, s3_port: int, num_actions: int,
         only: list[str]) -> Counts:
    rng, counts = random.Random(f"serving/{seed}/{number}"), Counts(number)
    folder = Path(tempfile.mkdtemp(prefix="embark-serving-soak-"))
    round_ = None
    try:
        store, workers, tables = rng.choice(stores), rng.choice([1, 1, 2]), rng.choice(["fp32", "fp32", "int8"])
        counts.case = f"{store}, {workers} workers, {tables}"
        place = f"s3://models/{folder.name}/at" if store == "bucket" else str(folder / "at")
        round_ = Round(folder, place, rng, WORKER.get(plant), s3_env(s3_port) if s3_port else {}, plant, counts,
                       workers=workers, tables=tables)
        round_.play(num_actions, only)
    except Stopped:
        pass
    except Exception as error:
        counts.difference = str(error) if isinstance(error, AssertionError) else traceback.format_exc()
    finally:
        if round_:
            counts.num_changes = round_.place.num_changes
            round_.end()
    if counts.difference:
        counts.log.append(f"its files: {folder}")
    else:
        shutil.rmtree(folder, ignore_errors=True)
    return counts


def rounds(args: argparse.Namespace, s3_port: int) -> Iterator[Counts]:
    numbers = [args.round] if args.round >= 0 else range(args.first, args.first + args.rounds)
    with ThreadPoolExecutor(args.jobs) as pool:
        pending = [pool.submit(play, number, args.seed, args.stores.split(","), args.plant, s3_port, args.actions,
                               args.only.split(",") if args.only else [])
                   for number in numbers]
        for future in as_completed(pending):
            yield (result := future.result())
            if args.plant and result.difference:
                Round.stopping.set()
                pool.shutdown(cancel_futures=True)
                return


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
    parser.add_argument("--plant", default="", choices=["", *PLANTS], help="a defect to plant in every process")
    args = parser.parse_args()
    began, total, differing, num_rounds = time.monotonic(), Counts(), [], 0
    with ExitStack() as stack:
        os.environ["EMBARK_CACHE"] = stack.enter_context(tempfile.TemporaryDirectory(prefix="embark-serving-cache-"))
        s3_port = stack.enter_context(s3()).port if "bucket" in args.stores else 0
        os.environ.update(s3_env(s3_port) if s3_port else {})
        if args.plant:
            plant_defect(args.plant)
        for result in rounds(args, s3_port):
            total.add(result)
            num_rounds += 1
            if result.difference:
                differing.append(result.number)
                print(f"round {result.number} ({result.case}) differs after {', '.join(result.log)}:\n"
                      f"{result.difference}\n  again: bench/serving_soak.py --seed {args.seed} --round {result.number}",
                      flush=True)
            if not num_rounds % 10:
                print(f"{num_rounds} rounds, {total.num_changes} version changes, {total.num_rows:,} rows, "
                      f"{time.monotonic() - began:.0f} s", flush=True)
    victims = ", ".join(f"{num} {name}" for name, num in total.kills.most_common())
    print(f"seed {args.seed}: {num_rounds} rounds, {total.actions.total()} actions, {total.num_changes:,} version "
          f"changes, {total.kills.total()} kills ({victims}), "
          f"{total.num_wiped} wiped or reused places, {total.num_rows:,} rows compared, {total.num_failed} requests "
          f"failed around kills, {total.num_lost} requests lost, {len(differing)} rounds differed"
          f"{': ' + str(sorted(differing)) if differing else ''}; {time.monotonic() - began:.0f} s")
    return bool(differing)


if __name__ == "__main__":
    sys.exit(main())
