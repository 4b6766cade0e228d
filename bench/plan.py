"""What `embark plan` predicts beside what is measured: bytes and step time, both models, three sizes, both engines.

    python bench/plan.py                 on a GPU
    python bench/plan.py --cpu           resident memory and step time of smaller models on this CPU

None of these runs is among those that a calibration is fitted to.
"""

from __future__ import annotations

import argparse

from embark.calibrate import ROW_HEADINGS, as_measured, compared
from embark.catalog import load_catalog
from embark.manners import Manners
from embark.plan.calibration import CPU, load_calibrations
from embark.plan.this_machine import gpu_of
from embark.spec import load_spec
from embark.train.bench.measure import measure_apart, rates_apart

GPU_RUNS = [(preset, batch, engine) for preset in ("quickstart", "criteo-1tb") for engine in ("captured", "pipeline")
            for batch in (2_048, 16_384, 65_536)]
CPU_RUNS = [("laptop", 1_024, "pipeline"), ("laptop", 8_192, "pipeline"), ("quickstart", 2_048, "pipeline"),
            ("quickstart", 8_192, "pipeline")]


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--cpu", action="store_true")
    arguments.add_argument("--seconds", type=float, default=1.5)
    asked = arguments.parse_args()
    place = "place.device=cpu" if asked.cpu else "place.device=cuda"
    device = CPU
    if not asked.cpu:
        found = rates_apart(load_spec("quickstart", [place]))
        gpu = gpu_of(found["device"], found["device_bytes"], load_catalog())
        device = gpu.name if gpu else ""
    calibration = load_calibrations()[device]
    rows = []
    for preset, batch, engine in CPU_RUNS if asked.cpu else GPU_RUNS:
        spec = load_spec(preset, [place, f"train.batch_size={batch}", f"train.engine={engine}",
                                  f"data.num_train_samples={16 * batch}", "data.num_eval_samples=0"])
        rows.append(compared(calibration, as_measured(spec, measure_apart(spec, seconds=asked.seconds),
                                                      is_gpu=not asked.cpu)))
        print(rows[-1], flush=True)
    print(f"{calibration.title}, calibrated {calibration.date}, {calibration.versions}")
    Manners().console().table(rows, ROW_HEADINGS)


if __name__ == "__main__":
    main()
