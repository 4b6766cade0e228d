"""One training step of this version against that of older ones, and whether they give the same losses.

    python bench/older_versions.py d38688e^ c42dafd [--spec quickstart] [--set train.batch_size=2048] [--turns 5]

Each argument is a commit of this repository, or a folder that holds its `src`. All versions train the same spec, one
process after the other and several turns, so that a busy machine slows them alike. Shown are milliseconds a step, the
median of all windows of all turns, and how many of the losses are those of this version bit for bit.
"""

import argparse
import io
import json
import os
import statistics
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent.parent
CHILD = """
import json, sys
from pathlib import Path
import embark
assert Path(embark.__file__).is_relative_to(sys.argv[1]), embark.__file__
values = embark.train(embark.load_spec(sys.argv[2], sys.argv[3:]), fresh=True)
lines = (Path(values["run_dir"]) / "events.jsonl").read_text().splitlines()
steps = [event for event in map(json.loads, lines) if event["event"] == "step"]
print(json.dumps({"loss": [event["loss"] for event in steps], "ms": [event["step_s"] * 1e3 for event in steps[2:]],
                  "auc": values.get("auc")}))
"""


def source_of(version: str, out: Path) -> Path:
    """The folder of a version's package."""
    if (Path(version) / "embark").is_dir():
        return Path(version).resolve()
    packed = subprocess.run(["git", "archive", version, "src"], cwd=HERE, check=True, capture_output=True).stdout
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        archive.extractall(out / version.replace("/", "_"), filter="data")
    return out / version.replace("/", "_") / "src"


def trained(source: Path, spec: str, root: Path, sets: list[str]) -> dict[str, list[float]]:
    """The losses and times of one turn."""
    command = [sys.executable, "-c", CHILD, str(source), spec, "name=step", f"store.root={root}",
               "watch.tensorboard=false", "watch.every=10", "store.checkpoint_at_end=false", "train.eval_every=0",
               *sets]
    path = os.pathsep.join([str(source), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(command, check=True, capture_output=True, text=True, cwd=root,
                          env={**os.environ, "PYTHONPATH": path})
    found: dict[str, list[float]] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("versions", nargs="+")
    parser.add_argument("--spec", default="quickstart")
    parser.add_argument("--set", action="append", default=[])
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--turns", type=int, default=5)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder)
        sources = {"this version": HERE / "src", **{name: source_of(name, out) for name in given.versions}}
        turns: dict[str, list[dict[str, list[float]]]] = {name: [] for name in sources}
        for _ in range(given.turns):
            for name, source in sources.items():
                turns[name].append(trained(source, given.spec, out, [f"train.num_steps={given.steps}", *given.set]))
        own = turns["this version"]
        own_ms = statistics.median(ms for turn in own for ms in turn["ms"])
        print("| | ms a step | of this version's | losses equal to the bit |\n|---|---|---|---|")
        for name, found in turns.items():
            ms = statistics.median(one for turn in found for one in turn["ms"])
            equal = sum(a == b for a, b in zip(found[0]["loss"], own[0]["loss"], strict=True))
            print(f"| {name} | {ms:.2f} | {ms / own_ms:.3f} | {equal} of {len(own[0]['loss'])} |")


if __name__ == "__main__":
    main()
