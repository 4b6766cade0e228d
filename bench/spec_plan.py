"""Specs written by hand, of models that people have: what `embark plan` predicts beside what is measured.

    python bench/spec_plan.py                                   those of bench/specs, on this machine's GPU
    python bench/spec_plan.py --device cpu bench/specs/tiny.toml

No calibration is fitted to them. Each is measured in a process of its own, from batches in memory, as the random specs
of random_plan.py are.
"""

from __future__ import annotations

import argparse
from concurrent.futures import as_completed
from pathlib import Path

from random_plan import process_for_each, show

from embark.cli.console import Console
from embark.plan.calibration import cpu_calibration, load_calibrations
from embark.plan.fit import Measurement
from embark.spec import RunSpec, load_spec
from embark.trainers.torch.bench.calibrate import compare, measure

SPECS = Path(__file__).parent / "specs"


def read_specs(paths: list[Path], device: str) -> list[RunSpec]:
    return [load_spec(str(path), [f"place.device={device}"]) for path in paths]


def measure_all(specs: list[RunSpec], seconds: float) -> list[Measurement]:
    """Measure one spec after the other; one that fails is named and left out."""
    found: list[Measurement] = []
    with process_for_each(1) as pool:
        waiting = {pool.submit(measure, spec, seconds): spec.name for spec in specs}
        for done in as_completed(waiting):
            if error := done.exception():
                Console().text(f"{waiting[done]}: {type(error).__name__}: {error}")
            else:
                found.append(done.result())
    return found


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("specs", nargs="*", type=Path)
    arguments.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    arguments.add_argument("--seconds", type=float, default=0.4)
    asked = arguments.parse_args()
    specs = read_specs(asked.specs or sorted(SPECS.glob("*.toml")), asked.device)
    calibration = cpu_calibration() if asked.device == "cpu" else load_calibrations()["H200"]
    show([compare(calibration, one) for one in measure_all(specs, asked.seconds)])


if __name__ == "__main__":
    main()
