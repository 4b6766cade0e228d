"""`embark --help` is quick, because nothing heavy is imported before a verb needs it."""

from __future__ import annotations

import os
import resource
import subprocess
import sys

HEAVY = ("torch", "torchrec", "fbgemm_gpu", "jax", "pyarrow", "tensorboard")
MAX_S = 0.3
# Coverage, where it measures subprocesses, would be timed too; and an installed command has its bytecode at hand.
ENV = {name: value for name, value in os.environ.items() if not name.startswith(("COV", "PYTHONDONTWRITE"))}


def test_help_answers_at_once():
    times_s: list[float] = []
    while len(times_s) < 15 and min(times_s, default=MAX_S) >= MAX_S:
        times_s.append(processor_s([sys.executable, "-m", "embark", "--help"]))
    assert min(times_s) < MAX_S


def processor_s(command: list[str]) -> float:
    """The processor time of `command`: its wall time on an idle machine, and not much more on a busy one."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(command, env=ENV, capture_output=True, timeout=60)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 0, done.stderr
    assert b"train" in done.stdout
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def test_help_imports_nothing_heavy():
    code = (
        "import sys, embark.__main__\n"
        "code = embark.__main__.run(['--help'])\n"
        f"sys.stderr.write(' '.join(m for m in {HEAVY!r} if m in sys.modules))\n"
        "sys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", code], env=ENV, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
