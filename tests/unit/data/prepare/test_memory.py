"""The memory that is told is that of all processes."""

from __future__ import annotations

import os
import subprocess
import sys
import time

from embark.data.prepare.memory import MemoryWatch, tree_bytes

HOLD = "import sys; held = bytearray(b'x' * 60_000_000); print('held', flush=True); sys.stdin.read()"


def test_what_a_child_holds_counts_and_the_peak_stays_when_it_is_gone():
    before = tree_bytes(os.getpid())
    with MemoryWatch() as watch:
        child = subprocess.Popen([sys.executable, "-c", HOLD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert child.stdout.readline() == "held\n"
        with_child = tree_bytes(os.getpid())
        while watch.peak_bytes < with_child - 5_000_000:
            time.sleep(0.05)
        child.communicate("")
    assert with_child - before > 60_000_000
    assert watch.peak_bytes - before > 55_000_000
    assert tree_bytes(os.getpid()) < with_child - 50_000_000
