"""Without JAX only what needs JAX is refused; and JAX needs no torch."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from limits import HANG_S

from embark import trainers
from embark.__main__ import run
from embark.spec import resolve
from embark.trainers import require_jax, wants_jax

SOURCES = Path(__file__).parents[4] / "src"
WITHOUT = """
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {absent!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Absent())
import importlib.util
honest = importlib.util.find_spec
importlib.util.find_spec = lambda name, package=None: None if name in {absent!r} else honest(name, package)
from embark.__main__ import run
code = run(sys.argv[1:])
sys.stderr.write("loaded: " + " ".join(m for m in ("jax", "torch") if m in sys.modules))
sys.exit(code)
"""
SPEC = """
[model]
num_dense = 2
embedding_dim = 4
bottom_mlp = [4]
top_mlp = [4]
num_tables = 2
rows_per_table = 20
[data]
num_train_samples = 256
num_eval_samples = 0
[train]
batch_size = 32
num_steps = 3
[store]
checkpoint_at_end = false
[watch]
tensorboard = false
"""


def embark_without(absent: tuple[str, ...], words: list[str], where: Path) -> subprocess.CompletedProcess[str]:
    (where / "t.toml").write_text(SPEC)
    env = os.environ | {"PYTHONPATH": str(SOURCES), "COLUMNS": "120"}
    return subprocess.run([sys.executable, "-c", WITHOUT.format(absent=absent), *words], cwd=where, env=env,
                          capture_output=True, text=True, timeout=HANG_S)


@pytest.mark.parametrize("device", ["jax", "tpu"])
def test_without_jax_the_error_names_the_extra(
    tmp_path, monkeypatch, capsys, device
):
    monkeypatch.setattr(trainers, "find_spec", lambda name: None)
    monkeypatch.setenv("COLUMNS", "120")
    (tmp_path / "t.toml").write_text(SPEC)
    assert run(["train", str(tmp_path / "t.toml"), "--set", f"place.device={device}"]) == 64
    output = capsys.readouterr().err
    assert f'place.device = "{device}" needs jax, which is not installed' in output
    assert re.search(rf"pip install (-e )?'\S+\[{device}\]'", output)
    assert "Traceback" not in output


@pytest.mark.slow
def test_without_jax_everything_else_runs(tmp_path):
    done = embark_without(("jax", "jaxlib"), ["train", "t.toml", "--set", "place.device=cpu"], tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stderr.endswith("loaded: torch")


def test_without_torch_a_run_in_jax_trains(tmp_path):
    words = ["train", "t.toml", "--set", "place.device=jax"]
    done = embark_without(("torch", "torchrec", "fbgemm_gpu"), words, tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stderr.endswith("loaded: jax")
    assert (tmp_path / "runs" / "t" / "events.jsonl").is_file()


def test_asking_for_tpus_where_there_are_none_is_refused(tmp_path):
    (tmp_path / "t.toml").write_text(SPEC)
    env = os.environ | {"PYTHONPATH": str(SOURCES), "JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, "-m", "embark", "train", "t.toml", "--set", "place.device=tpu"],
                          cwd=tmp_path, env=env, capture_output=True, text=True, timeout=HANG_S)
    assert done.returncode == 64
    assert "asks for TPUs, and JAX sees none here" in done.stderr


def test_a_slice_of_tpus_gets_this_trainer_by_itself():
    def place(**values):
        return resolve({"place": values})

    assert wants_jax(place(target="tpu-vm"))
    assert wants_jax(place(device="tpu"))
    assert wants_jax(place(device="jax"))
    assert wants_jax(place(machine="v5litepod-8", target="vertex"))
    assert not wants_jax(place(machine="a3-highgpu-8g"))
    assert not wants_jax(place())
    assert not wants_jax(place(device="cpu", target="tpu-vm"))
    require_jax(place(device="jax"))
