"""Dynamic tables against static ones: the time of a step, and the AUC on a stream whose ids come and go.

    python bench/dynamic_tables.py speed --batch-size 65536
    python bench/dynamic_tables.py auc --out /tmp/dynamic

`speed`: the quickstart's shape, synthetic Zipf ids, on this machine's device, in one process and in turns: static
tables; dynamic ones of as many rows, whose ids all have a row; dynamic ones with ten times as many ids as rows.

`auc`: the stream of `examples/drifting_world.py`, the AUC of rows before they are learnt from, over the last half.
Dynamic tables with rows for a tenth of all ids that ever occur, against a table with a row for each of them and against
ids modulo as many rows.
"""

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
import drifting_world

from embark import train
from embark.data import open_source
from embark.spec import PRESETS, RunSpec, resolve

ROUNDS = 7
WARM_UP_STEPS = 300


def with_tables(spec: RunSpec, num_ids: int, capacity: int = 0, **more: Any) -> RunSpec:
    """The spec with tables of `num_ids` ids; with a capacity, dynamic ones."""
    about = {"ids": "dynamic", "capacity": capacity, **more} if capacity else {}
    tables = [{"name": table.name, "rows": num_ids, **about} for table in spec.model.table_list()]
    raw = spec.model_dump(mode="json", exclude_defaults=True)
    return RunSpec.model_validate({**raw, "model": {**raw.get("model", {}), "tables": tables}})


def speed(given: argparse.Namespace) -> None:
    import torch

    from embark.trainers.torch.trainer import TorchTrainer
    from embark.trainers.torch.world import join

    size, rows = given.batch_size, given.rows
    base = resolve(PRESETS["quickstart"]().model_dump(mode="json", exclude_defaults=True), [
        f"train.batch_size={size}", f"data.num_train_samples={size * given.samples}", *given.set])
    specs = {
        "static": with_tables(base, rows), "dynamic, all ids have rows": with_tables(base, rows, 2 * rows),
        "dynamic, 10 × as many ids": with_tables(base, 10 * rows, rows),
        "dynamic, 10 × as many ids, lfu": with_tables(base, 10 * rows, rows, evict="lfu", admit="count"),
    }
    with join(base.place) as world:
        is_cuda, runs = world.device.type == "cuda", {}
        for name, spec in specs.items():
            trainer = TorchTrainer(spec, world, 10**6, source := open_source(spec))
            feed = trainer.feed(source, 0, 10**6)
            runs[name] = [trainer, feed, feed.__enter__(), 0]

        def run(name: str, num_steps: int) -> float:
            trainer, _, batches, step = runs[name]
            if is_cuda:
                torch.cuda.synchronize()
            started = time.perf_counter()
            for at in range(step, step + num_steps):
                trainer.step(batches, at)
            if is_cuda:
                torch.cuda.synchronize()
            runs[name][3] += num_steps
            return (time.perf_counter() - started) / num_steps * 1e3

        for name in specs:
            run(name, given.warm_up)
            runs[name][0].window_metrics()
        times: dict[str, list[float]] = {name: [] for name in specs}
        for _ in range(ROUNDS):
            for name in specs:
                times[name].append(run(name, given.steps))
        print(f"{world.device_name}, batch {size:,}, {rows:,} rows, engine {runs['static'][0].engine.name}")
        print("| tables | ms a step (least to most) | against static | ids with a row | admitted a step |")
        print("|---|---|---|---|---|")
        static = statistics.median(times["static"])
        for name, of_name in times.items():
            found = runs[name][0].window_metrics()
            hits = statistics.mean(found.get("id_hit_rate", {"": 1.0}).values())
            new = sum(found.get("ids_admitted", {"": 0}).values()) / (ROUNDS * given.steps)
            middle = statistics.median(of_name)
            print(f"| {name} | {middle:.3f} ({min(of_name):.3f} to {max(of_name):.3f}) | {middle / static - 1:+.1%} | "
                  f"{hits:.3f} | {new:,.0f} |")
        if given.profile:
            from torch.profiler import ProfilerActivity, profile

            for name in specs:
                with profile(activities=[ProfilerActivity.CUDA]) as profiled:
                    run(name, 10)
                print(name, profiled.key_averages().table(sort_by="cuda_time_total", row_limit=24,
                                                          max_name_column_width=70), sep="\n")
        for _, feed, _, _ in runs.values():
            feed.__exit__(None, None, None)


def auc(given: argparse.Namespace) -> None:
    """Each table has `num_ids` ids at a time; how many ever occur is counted."""
    world = {"num_features": 3, "samples_per_day": given.samples // given.days, "num_ids": given.ids,
             "id_churn": given.churn}
    base = resolve({
        "name": "base", "model": {"num_dense": 4, "num_tables": 3, "rows_per_table": 8, "embedding_dim": 16,
                                  "bottom_mlp": [32], "top_mlp": [64, 32]},
        "stream": {"source": "drifting_world:Stream", "time_column": "time"},
        "train": {"batch_size": 512, "num_steps": given.samples // 512, "learning_rate": 0.05,
                  "dense_optimizer": "adam", "dense_learning_rate": 0.002, "precision": "fp32"},
        "place": {"device": "cpu"}, "store": {"root": str(given.out), "checkpoint_at_end": False},
        "watch": {"every": 50, "tensorboard": False}}, given.set)
    drifting = drifting_world.World(**world)
    ids = drifting.samples(np.arange(given.samples))[2]
    distinct = [len(np.unique(column)) for column in ids.T]
    rows = round(sum(distinct) / len(distinct) / 10)
    print(f"{given.samples:,} samples, ids that occur: {', '.join(f'{num:,}' for num in distinct)}; a tenth: {rows:,}")
    print("| tables | rows of each | AUC of the last half | best possible |\n|---|---|---|---|")
    contenders = {
        "a row for each id": with_tables(base, 8, 2 * max(distinct)),
        "dynamic, lru": with_tables(base, 8, rows), "dynamic, lfu": with_tables(base, 8, rows, evict="lfu"),
        "dynamic, lfu, admit count": with_tables(base, 8, rows, evict="lfu", admit="count"),
        "ids modulo the rows": with_tables(base, rows),
    }
    for name, spec in contenders.items():
        rows = 0 if spec.model.has_dynamic_tables else spec.model.stored_tables()[0].rows
        code = f"{Path(drifting_world.__file__).read_text()}\nStream.settings = {world | {'rows': rows}}\n"
        values = train(spec.model_copy(update={"name": "".join(filter(str.isalnum, name)),
                                               "stream": spec.stream.model_copy(update={"code": code})}), fresh=True)
        lines = Path(values["run_dir"], "events.jsonl").read_text().splitlines()
        steps = [event for event in map(json.loads, lines) if event["event"] == "step"]
        last = [event["auc"] for event in steps if event["step"] > given.samples // 512 // 2]
        best = drifting.best_auc(np.arange(given.samples // 2, given.samples))
        print(f"| {name} | {spec.model.stored_tables()[0].rows:,} | {np.mean(last):.4f} | {best:.4f} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("what", choices=("speed", "auc"))
    parser.add_argument("--batch-size", type=int, default=65_536)
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--warm-up", type=int, default=WARM_UP_STEPS)
    parser.add_argument("--out", type=Path, default=Path("/tmp/dynamic"))
    parser.add_argument("--profile", action="store_true", help="speed: the kernels of ten steps, too")
    parser.add_argument("--samples", type=int, default=0)
    parser.add_argument("--days", type=int, default=10)
    parser.add_argument("--ids", type=int, default=20_000)
    parser.add_argument("--churn", type=float, default=0.5)
    parser.add_argument("--set", action="append", default=[])
    given = parser.parse_args()
    given.samples = given.samples or (1000 if given.what == "speed" else 1_000_000)
    {"speed": speed, "auc": auc}[given.what](given)


if __name__ == "__main__":
    main()
