"""What `embark plan` predicts beside what is measured: bytes and step time, both models, three sizes, both engines.

    python bench/plan.py                 on a GPU
    python bench/plan.py --cpu           resident memory and step time of smaller models on this CPU
    python bench/plan.py --measured FILE computes only: fits the rows of a CSV that are for it together with the fitted
                                         ones of bench/h200_random.csv, compares the others

None of these runs is among those that a calibration is fitted to. A pipeline's small steps wait for Python, whose pace
differs from process to process by up to a third: each is measured in three processes, and the middle one counts.
"""

from __future__ import annotations

import argparse
import csv
import statistics
from dataclasses import replace
from pathlib import Path

from random_plan import read_measured

from embark.catalog import load_catalog
from embark.cli.console import Console
from embark.plan.calibration import CPU, Calibration, load_calibrations
from embark.plan.fit import Measurement, fit_calibration
from embark.plan.predict import match_gpu
from embark.spec import RunSpec, load_spec
from embark.trainers.torch.bench.calibrate import (
    Comparison,
    calibration_models,
    compare,
    in_new_process,
    measure,
    measure_rates,
)

GPU_RUNS = [(preset, batch, engine) for preset in ("quickstart", "criteo-1tb") for engine in ("cuda_graph", "pipeline")
            for batch in (2_048, 16_384, 65_536)]
CPU_RUNS = [("laptop", 1_024, "pipeline"), ("laptop", 8_192, "pipeline"), ("quickstart", 2_048, "pipeline"),
            ("quickstart", 8_192, "pipeline")]
PROCESSES = {"cuda_graph": 1, "pipeline": 3}


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--cpu", action="store_true")
    arguments.add_argument("--seconds", type=float, default=1.5)
    arguments.add_argument("--measured", type=Path)
    asked = arguments.parse_args()
    if asked.measured:
        calibration, rest = recorded(asked.measured)
        print(calibration.engines, calibration.memory, sep="\n")
        Console().table([_row(compare(calibration, one)) for one in rest])
        return
    place = "place.device=cpu" if asked.cpu else "place.device=cuda"
    device = CPU
    if not asked.cpu:
        rates = in_new_process(measure_rates, load_spec("quickstart", [place]))
        gpu = match_gpu(rates.device, rates.device_bytes, load_catalog())
        device = gpu.name if gpu else ""
    calibration = load_calibrations()[device]
    rows = []
    for preset, batch, engine in CPU_RUNS if asked.cpu else GPU_RUNS:
        spec = load_spec(preset, [place, f"train.batch_size={batch}", f"train.engine={engine}",
                                  f"data.num_train_samples={16 * batch}", "data.num_eval_samples=0"])
        found = [in_new_process(measure, spec, asked.seconds) for _ in range(1 if asked.cpu else PROCESSES[engine])]
        rows.append(_row(compare(calibration, _middle(found))))
        print(rows[-1], "ms in each process:", [round(one.step_s * 1e3, 3) for one in found], flush=True)
    print(f"{calibration.title}, calibrated {calibration.date}, {calibration.versions}")
    Console().table(rows)


def _row(one: Comparison) -> dict[str, object]:
    return {"model": one.model, "engine": one.engine, "batch": one.batch, "ms/step": f"{one.step_s * 1e3:.3f}",
            "predicted": f"{one.predicted_s * 1e3:.3f}", "off by": f"{one.predicted_s / one.step_s - 1:+.1%}",
            "GiB": f"{one.used_bytes / 2**30:.2f}", "predicted ": f"{one.predicted_bytes / 2**30:.2f}",
            "off by ": f"{one.predicted_bytes / one.used_bytes - 1:+.1%}"}


def recorded(path: Path) -> tuple[Calibration, list[Measurement]]:
    """The shipped H200's rates with the fit of the rows marked `fit` and of random specs, and the others."""
    rows: dict[str, list[Measurement]] = {"fit": [], "compare": []}
    with path.open() as file:
        for row in csv.DictReader(file):
            used_bytes = float(row["used_gib"]) * 2**30
            rows[row["use"]].append(Measurement(_spec_of(row), row["engine"], "bf16", float(row["step_ms"]) / 1e3,
                                             used_bytes, 0.0, 0.0, python_s=float(row.get("python_s") or 0)))
    fitted, _ = read_measured(Path(__file__).with_name("h200_random.csv"), "cuda")
    shipped = load_calibrations()["H200"]
    return fit_calibration(replace(shipped, engines={}, memory={}), [*rows["fit"], *fitted]), rows["compare"]


def _spec_of(row: dict[str, str]) -> RunSpec:
    sets = ["place.device=cuda", f"train.batch_size={row['batch']}", f"train.engine={row['engine']}",
            f"data.num_train_samples={16 * int(row['batch'])}", "data.num_eval_samples=0"]
    model = calibration_models(is_gpu=True).get(row["model"])
    if model is None:
        return load_spec(row["model"], sets)
    return load_spec("quickstart", sets).model_copy(update={"name": row["model"], "model": model})


def _middle(found: list[Measurement]) -> Measurement:
    """The process whose step time is the median of all."""
    middle = statistics.median_low(one.step_s for one in found)
    return next(one for one in found if one.step_s == middle)


if __name__ == "__main__":
    main()
