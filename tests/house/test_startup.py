"""`embark --help` is quick: nothing heavy is imported before a command needs it."""

from __future__ import annotations

import os
import subprocess
import sys

HEAVY = ("torch", "torchrec", "fbgemm_gpu", "jax", "pyarrow", "tensorboard", "numpy", "pydantic")
TRAINERS = HEAVY[:4]
MAX_MODULES = 260
"""What `embark --help` may import, the standard library's modules included: it imports 215."""
# Coverage, where it measures subprocesses, would be counted too.
ENV = {name: value for name, value in os.environ.items() if not name.startswith("COV")}
IMPORT_ALL = """
import embark, importlib, pkgutil
OWN = ("embark.trainers.torch", "embark.trainers.jax", "embark.torchrun", "embark.__main__")
for module in pkgutil.walk_packages(embark.__path__, "embark."):
    if not module.name.startswith(OWN):
        importlib.import_module(module.name)
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
    done = subprocess.run([sys.executable, "-c", code], env=ENV, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return done.stderr
