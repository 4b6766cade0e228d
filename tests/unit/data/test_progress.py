"""Progress comes stage by stage with the time that is left, and the memory is that of all processes."""

from __future__ import annotations

import subprocess
import sys

from embark.data.progress import Progress, ProgressReporter

# In a process of its own: pages of the libraries count less for a process whenever another one maps them, too.
MEASURE = """
import os, subprocess, sys, time
from embark.data.progress import MemoryMonitor, tree_bytes

hold = "import sys; held = bytearray(b'x' * 200_000_000); print('held', flush=True); sys.stdin.read()"
before = tree_bytes(os.getpid())
with MemoryMonitor() as watch:
    child = subprocess.Popen([sys.executable, "-c", hold], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert child.stdout.readline() == "held\\n"
    with_child, until = tree_bytes(os.getpid()), time.monotonic() + 240
    while watch.peak_bytes - before < 150_000_000 and time.monotonic() < until:
        time.sleep(0.05)
    child.communicate("")
print(before, with_child, tree_bytes(os.getpid()), watch.peak_bytes)
"""


def test_what_a_child_holds_counts_and_the_peak_stays_when_it_is_gone():
    done = subprocess.run([sys.executable, "-c", MEASURE], capture_output=True, text=True, check=True, timeout=480)
    before, with_child, after, peak = map(int, done.stdout.split())
    assert with_child - before > 150_000_000
    assert peak - before > 150_000_000
    assert after - before < 50_000_000


def test_stages_are_reported_and_earlier_work_does_not_count_for_speed():
    reports: list[Progress] = []
    reporter = ProgressReporter(reports.append)
    reporter.begin("reading", 10, done=4)
    reporter.advance(6, num_rows=3, num_bad=1)
    reporter.end()
    assert [(p.stage, p.done, p.total, p.rows, p.num_bad) for p in reports] == [
        ("reading", 4, 10, 0, 0), ("reading", 10, 10, 3, 1), ("done", 1, 1, 3, 1)]
    assert [p.left_s for p in reports] == [None, 0.0, None]
