"""Random runs under random faults: after each round, losses, checkpoints and events are those of the undisturbed run.

    .venv/bin/python bench/soak.py --seed 1 --rounds 200 --jobs 2
    .venv/bin/python bench/soak.py --seed 1 --rounds 200 --jobs 16 --device cuda --trainers torch --stores folder
    .venv/bin/python bench/soak.py --seed 1 --round 17          # one round again
    .venv/bin/python bench/soak.py --seed 1 --plant early_mark  # does it find a defect? ends at the first difference

A round draws a model, ranks, an engine, a store and data from the seed, trains it undisturbed, then again under some
ten faults, one a start: kill, stop, pause, full disk, slow and failing store, clock jump, lost host, lost lease, second
writer.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
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

from integration.cloud.emulators import s3, s3_env  # noqa: E402
from integration.cloud.faulty_proxy import proxy_to  # noqa: E402
from integration.faults.conftest import JAX, TORCH, Run, Zygote  # noqa: E402
from soak_cases import draw_case  # noqa: E402
from soak_comparison import Difference, Result, compare  # noqa: E402
from soak_faults import Round, Stopped  # noqa: E402
from soak_hooks import PLANTS  # noqa: E402


class Worker(threading.local):
    """What a thread keeps from round to round."""

    def __init__(self) -> None:
        self.zygotes: dict[str, Zygote] = {}

    def zygote(self, trainer: str, device: str) -> Zygote:
        kind = "jax" if trainer == "jax" else "torch"
        if kind not in self.zygotes:
            settings = {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])}
            if kind == "jax":
                settings |= {"JAX_NUM_CPU_DEVICES": "2", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1", "JAX_PLATFORMS": "cpu"}
            elif device == "cpu":
                settings |= {"CUDA_VISIBLE_DEVICES": ""}
            else:
                settings |= {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}  # CUDA must not be initialized before a fork
            self.zygotes[kind] = Zygote(JAX if kind == "jax" else TORCH, **settings)
        return self.zygotes[kind]


WORKER = Worker()


def play(number: int, seed: int, trainers: list[str], stores: list[str], device: str, plant: str,
         s3_port: int) -> Result:
    rng, result = random.Random(f"{seed}/{number}"), Result(number)
    folder = Path(tempfile.mkdtemp(prefix="embark-soak-"))
    started: list[Run] = []
    try:
        with ExitStack() as stack:
            case = draw_case(rng, trainers, stores, folder, device)
            result.case = str(case)
            proxy = stack.enter_context(proxy_to(s3_port)) if case.store == "bucket" else None
            env = s3_env(proxy.port) if proxy else {}
            for name in ("plain", "disturbed"):
                (folder / name).mkdir()
                (folder / name / "spec.toml").write_text(case.spec)
                started.append(Run(WORKER.zygote(case.trainer, case.device), folder / name,
                                   root=f"s3://models/{folder.name}/{name}" if proxy else "",
                                   cache=folder / name / "cache" if proxy else None))
            plain, run = started
            if (codes := plain.ends(case.num_ranks, *case.sets, env=env)) != [0] * case.num_ranks:
                raise Difference(f"the undisturbed run ended with {codes}:\n{plain.output()[-3000:]}")
            round_ = Round(case, run, rng, plant, proxy, env, result)
            round_.play()
            compare(plain, run, result, is_record_complete=round_.is_record_complete)
    except Stopped:
        pass
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
    numbers = [args.round] if args.round >= 0 else range(args.first, args.first + args.rounds)
    with ThreadPoolExecutor(args.jobs) as pool:
        pending = [pool.submit(play, number, args.seed, args.trainers.split(","), args.stores.split(","),
                               args.device, args.plant, s3_port) for number in numbers]
        for future in as_completed(pending):
            result = future.result()
            yield result
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
    parser.add_argument("--trainers", default="torch,torch,torch,jax", help="of torch, jax; drawn evenly")
    parser.add_argument("--stores", default="folder,folder,bucket", help="of folder, bucket; drawn evenly")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"], help="of torch")
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
            if not num_rounds % 5:
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
