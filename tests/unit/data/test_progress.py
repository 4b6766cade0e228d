"""Progress comes stage by stage with the time that is left, and the memory is that of all processes."""

from __future__ import annotations

import os
import subprocess
import sys
import time

from embark.data.workers import MemoryMonitor, Progress, ProgressReporter, tree_bytes

HOLD = "import sys; held = bytearray(b'x' * 60_000_000); print('held', flush=True); sys.stdin.read()"


def test_what_a_child_holds_counts_and_the_peak_stays_when_it_is_gone():
    before = tree_bytes(os.getpid())
    with MemoryMonitor() as watch:
        child = subprocess.Popen([sys.executable, "-c", HOLD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert child.stdout.readline() == "held\n"
        with_child = tree_bytes(os.getpid())
        while watch.peak_bytes < with_child - 5_000_000:
            time.sleep(0.05)
        child.communicate("")
    assert with_child - before > 60_000_000
    assert watch.peak_bytes - before > 55_000_000
    assert tree_bytes(os.getpid()) < with_child - 50_000_000


def test_each_stage_begins_and_ends_with_a_report_and_work_done_earlier_does_not_count_for_the_speed():
    reports: list[Progress] = []
    reporter = ProgressReporter(reports.append)
    reporter.begin("reading", 10, done=4)
    reporter.advance(6, num_rows=3, num_bad=1)
    reporter.end()
    assert [(p.stage, p.done, p.total, p.rows, p.num_bad) for p in reports] == [
        ("reading", 4, 10, 0, 0), ("reading", 10, 10, 3, 1), ("done", 1, 1, 3, 1)]
    assert [p.left_s for p in reports] == [None, 0.0, None]
