"""A server on a disk of the size that `embark render` asks for goes through full exports and a rollback."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from exported_runs import EditedRun
from limits import HANG_S

from embark import export_run
from embark.export.rollback import rollback
from embark.export.write_version import MAX_SHARE
from embark.plan.serving import SCRATCH_BYTES, versions_bytes

pytestmark = [pytest.mark.slow, pytest.mark.needs("unshare")]
NUM_ROWS = 1_500_000  # A version has 24 MB.
START = """
set -e
mount -t tmpfs -o size="$1" tmpfs "$2"
exec "$3" -m embark serve "$4" --port 0 --poll-s 0.2 --workers "$5"
"""


class Traffic:
    """Requests without a pause, and how many were not answered by a score."""

    def __init__(self, port: int) -> None:
        self.port, self.failed, self.num_answered, self.version = port, [], 0, 0
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Traffic:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        self._thread.join(HANG_S)

    def _run(self) -> None:
        body = json.dumps({"rows": [{"a": 1, "b": 2, "dense_0": 0.5, "dense_1": 1.0}]}).encode()
        while not self._stopping.is_set():
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/score", body, timeout=HANG_S) as answer:
                    found = json.load(answer)
                self.version = found["version"]
                self.num_answered += found["scores"][0] is not None
            except Exception as error:
                self.failed.append(repr(error))

    def wait_for(self, version: int, server: subprocess.Popen[str]) -> None:
        until_s = time.monotonic() + HANG_S
        while self.version != version:
            assert not self.failed
            assert server.poll() is None
            assert time.monotonic() < until_s, f"version {version} was not served"
            time.sleep(0.05)


@contextmanager
def server_on_disk(
    uri: str, size_bytes: float, folder: Path, num_workers: int,
) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """Serve with a cache on a file system of this size, in a mount namespace of its own."""
    disk, log = folder / "disk", folder / "log"
    disk.mkdir()
    with log.open("w") as out:
        server = subprocess.Popen(
            ["unshare", "--map-root-user", "--mount", "bash", "-c", START, "start", str(int(size_bytes)), str(disk),
             sys.executable, uri, str(num_workers)],
            stdout=out, stderr=out, text=True, env={**os.environ, "EMBARK_CACHE": str(disk)})
        try:
            until_s = time.monotonic() + HANG_S
            while not (found := re.search(r"http://[^\s:]+:(\d+)", log.read_text())):
                assert server.poll() is None, log.read_text()
                assert time.monotonic() < until_s, log.read_text()
                time.sleep(0.1)
            yield server, int(found[1])
        finally:
            server.send_signal(signal.SIGTERM)
            server.wait(HANG_S)


@pytest.mark.parametrize("num_workers", [1, 2])
def test_full_exports_and_rollbacks_fit_the_rendered_disk(s3_emulator, environment, tmp_path, num_workers):
    """Two versions are on the disk at once, not three: the one before is deleted before the next is fetched."""
    environment(s3_emulator.env)
    run = EditedRun(tmp_path, rows=NUM_ROWS)
    uri = f"{s3_emulator.uri}/disk-{num_workers}"
    first = export_run(run.save(), uri)
    # None of these versions has deltas, so that the deltas' share of the disk is left out; nor has it other files.
    size_bytes = (versions_bytes(first.num_bytes) - SCRATCH_BYTES) / (1 + MAX_SHARE) + (2 << 20)
    with server_on_disk(uri, size_bytes, tmp_path, num_workers) as (server, port), Traffic(port) as traffic:
        traffic.wait_for(1, server)
        for version in (2, 3, 4):
            export_run(run.save(), uri)
            traffic.wait_for(version, server)
        rollback(uri, 3)
        traffic.wait_for(3, server)
        rollback(uri, 1)
        traffic.wait_for(1, server)
        export_run(run.save(), uri)
        traffic.wait_for(5, server)
    assert not traffic.failed
    assert traffic.num_answered
