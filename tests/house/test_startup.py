"""`embark --help` is quick: nothing heavy is imported before a command needs it."""

from __future__ import annotations

import os
import resource
import subprocess
import sys

HEAVY = ("torch", "torchrec", "fbgemm_gpu", "jax", "pyarrow", "tensorboard", "numpy", "pydantic")
TRAINERS = HEAVY[:4]
MAX_S = 0.3
# Coverage, where it measures subprocesses, would be timed too; and an installed command has its bytecode at hand.
ENV = {name: value for name, value in os.environ.items() if not name.startswith(("COV", "PYTHONDONTWRITE"))}


def test_help_takes_less_than_a_third_of_a_second_of_processor_time():
    times_s: list[float] = []
    while len(times_s) < 15 and min(times_s, default=MAX_S) >= MAX_S:
        times_s.append(processor_s([sys.executable, "-m", "embark", "--help"]))
    assert min(times_s) < MAX_S


def test_help_and_the_python_api_import_nothing_heavy():
    assert imported("import embark.__main__; embark.__main__.run(['--help'])", HEAVY) == ""
    assert imported("import embark", HEAVY) == ""


def test_no_command_s_module_imports_torch_or_jax():
    """Only the training commands themselves do, when they run."""
    load = ("from importlib import import_module; from embark.cli.app import COMMANDS\n"
            "for commands in COMMANDS.values():\n"
            "    for path, _ in commands.values():\n"
            "        getattr(import_module('embark.cli.' + path.partition(':')[0]), path.partition(':')[2])")
    assert imported(load, TRAINERS) == ""


def processor_s(command: list[str]) -> float:
    """The processor time of `command`: its wall time on an idle machine, and not much more on a busy one."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(command, env=ENV, capture_output=True, timeout=60)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 0, done.stderr
    assert b"train" in done.stdout
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def imported(code: str, names: tuple[str, ...]) -> str:
    """Which of `names` are imported after `code` ran in a process of its own."""
    code += f"\nimport sys; sys.stderr.write(' '.join(m for m in {names!r} if m in sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], env=ENV, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stderr
