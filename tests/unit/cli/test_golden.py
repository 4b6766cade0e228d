"""What commands print for a person, each beside its file in tests/fixtures/cli/output.

`EMBARK_WRITE_GOLDEN=1` writes the files again: look at their difference before you commit them.
"""

import os
from pathlib import Path

import pytest

from embark.__main__ import run
from embark.events.events import Event
from embark.spec import resolve, to_toml

FIXTURES = Path(__file__).parents[2] / "fixtures"
BEGAN_S = 1_760_000_000.0
COMMANDS = {
    "catalog-list": "catalog list a3-high --sort price",
    "catalog-list-volumes": "catalog list --volumes --tib 12",
    "catalog-show": "catalog show p5.48xlarge",
    "catalog-show-several": "catalog show p6-b300.48xlarge a4-highgpu-8g",
    "compare": "compare one two",
    "cost": "cost one",
    "diagnose": "diagnose {fixtures}/diagnose/faulty/ray_node.log",
    "help": "--help",
    "init": "init laptop",
    "lint": "lint {fixtures}/lint/faulty/a2_with_tcpx.yaml",
    "plan": "plan criteo-1tb --set place.machine=p4d.24xlarge --set place.nodes=2",
    "plan-across": "plan criteo-1tb --across --cloud gcp --samples 4195197692",
    "plan-serve": "plan quickstart --serve --qps 500 --p99-ms 20 --cloud aws",
    "status": "status",
}


def write_run(name: str, auc: float, **spec: object) -> None:
    """Write a run of 100 steps that was killed once and then finished."""
    start = {"name": name, "device": "cpu", "device_name": "2 CPU threads", "world_size": 1, "num_steps": 100,
             "batch_size": 64, "usd_per_hour": 3600.0}
    events = []
    for first, last, at_s in ((0, 50, 0.0), (40, 100, 100.0)):
        events.append(Event("start", {**start, "first_step": first}, BEGAN_S + at_s))
        events += [Event("step", {"step": step, "loss": 0.7 - step / 1000, "auc": auc, "step_s": 1.0,
                                  "samples_per_s": 64.0}, BEGAN_S + at_s + step - first)
                   for step in range(first + 5, last + 1, 5)]
    ended_s = BEGAN_S + 161
    events += [Event("eval", {"step": 100, "auc": auc, "log_loss": 0.5, "num_samples": 9}, ended_s),
               Event("end", {"outcome": "done", "step": 100, "samples_per_s": 64.0, "step_s": 1.0}, ended_s)]
    folder = Path("runs", name)
    folder.mkdir(parents=True)
    (folder / "spec.toml").write_text(to_toml(resolve({"name": name, **spec})))
    (folder / "events.jsonl").write_text("".join(f"{event.to_json()}\n" for event in events))


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_prints_what_its_file_has(name, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    write_run("one", 0.70)
    write_run("two", 0.75, train={"batch_size": 4096})
    run(COMMANDS[name].format(fixtures=FIXTURES).split())
    printed, file = capsys.readouterr().out.replace(str(FIXTURES), "FIXTURES"), FIXTURES / f"cli/output/{name}.txt"
    text = "".join(f"{line.rstrip()}\n" for line in printed.splitlines())
    if os.environ.get("EMBARK_WRITE_GOLDEN"):
        file.write_text(text)
    assert text == file.read_text()
