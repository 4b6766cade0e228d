"""`embark --help` is quick: nothing heavy is imported before a command needs it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from limits import HANG_S

HEAVY = ("torch", "torchrec", "fbgemm_gpu", "jax", "pyarrow", "tensorboard", "numpy", "pydantic")
TRAINERS = HEAVY[:4]
MAX_MODULES = 260
"""What `embark --help` may import, the standard library's modules included: it imports 215."""
# Coverage, where it measures subprocesses, would be counted too.
ENV = {name: value for name, value in os.environ.items() if not name.startswith("COV")}
IMPORT_ALL = """
import embark, importlib, pathlib
OWN = ("embark.trainers.torch", "embark.trainers.jax", "embark.torchrun", "embark.__main__")
source = pathlib.Path(embark.__file__).parents[1]
for path in sorted(source.glob("embark/**/*.py")):
    name = ".".join(path.relative_to(source).with_suffix("").parts).removesuffix(".__init__")
    if not name.startswith(OWN):
        importlib.import_module(name)
"""


def test_help_imports_few_modules():
    """Their number is what its time follows; unlike the time, it is the same on every machine."""
    code = ("import sys; before = set(sys.modules); import embark.__main__; embark.__main__.run(['--help'])\n"
            "sys.stderr.write(str(len(set(sys.modules) - before)))")
    assert 0 < int(stderr_of(code)) <= MAX_MODULES


def test_help_and_the_python_api_import_nothing_heavy():
    assert imported("import embark.__main__; embark.__main__.run(['--help'])", HEAVY) == ""
    assert imported("import embark", HEAVY) == ""


def test_no_module_outside_the_trainers_imports_torch_or_jax():
    """Only the training commands themselves do, when they run."""
    assert imported(IMPORT_ALL, TRAINERS) == ""


def imported(code: str, names: tuple[str, ...]) -> str:
    """Which of `names` are imported after `code` ran in a process of its own."""
    return stderr_of(f"{code}\nimport sys; sys.stderr.write(' '.join(m for m in {names!r} if m in sys.modules))")


def stderr_of(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], env=ENV, capture_output=True, text=True, timeout=HANG_S)
    assert done.returncode == 0, done.stderr
    return done.stderr


NEVER = ("tensordict", "torch._dynamo", "torch.distributed.checkpoint", "torch.distributed.fsdp",
         "torch.distributed.optim", "torch.distributed.tensor", "sympy", "triton")
"""What training on a CPU does not import at all."""
LATER = (*NEVER, "absl", "boto3", "botocore", "embark.diagnose", "embark.launch", "embark.render",
         "embark.report.report", "fsspec", "jinja2", "pandas", "pyarrow", "tensorboard.summary", "urllib3")
"""What is not imported before the first step: a person waits for it."""
TRAIN = f"NEVER, LATER = {NEVER!r}, {LATER!r}" + """
import sys, embark.__main__
from pathlib import Path
from embark.trainers.torch.lazy_imports import is_loaded
from embark.trainers.torch.trainer import TorchTrainer
step_with, at_first_step = TorchTrainer.step, []
def step(trainer, batches, number):
    rate = step_with(trainer, batches, number)
    at_first_step.extend([] if number else filter(is_loaded, LATER))
    return rate
TorchTrainer.step = step
settings = ["store.root=" + sys.argv[1], "place.device=cpu", "train.num_steps=60", "train.batch_size=64",
            "model.num_tables=2", "model.rows_per_table=100",
            "data.num_eval_samples=64", "train.eval_every=30", "watch.every=5"]
code = embark.__main__.run(["train", "quickstart", "--quiet", *(word for s in settings for word in ("--set", s))])
assert code == 0
assert not at_first_step, at_first_step
assert is_loaded("embark.report.report")  # at the end, for the report
assert '"phases"' in Path(sys.argv[1], "quickstart", "events.jsonl").read_text()  # some steps were profiled
loaded = [name for name in NEVER if is_loaded(name)]
assert not loaded, loaded
import torch
assert torch.compile(lambda x: x + 1, backend="eager")(torch.ones(1)).item() == 2
assert torch._dynamo.utils.get_optimize_ddp_mode() == "ddp_optimizer"  # what the stand-in said
from torch.distributed.tensor import DTensor
from torchrec.distributed import embeddingbag
assert issubclass(DTensor, embeddingbag.DTensor)
"""


@pytest.mark.slow
def test_training_loads_no_compiler_and_a_model_still_can(tmp_path: Path):
    words = [sys.executable, "-c", TRAIN, str(tmp_path)]
    done = subprocess.run(words, env=ENV, capture_output=True, text=True, timeout=HANG_S)
    assert done.returncode == 0, done.stderr
