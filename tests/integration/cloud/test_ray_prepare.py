"""`embark data prepare` on a real Ray cluster: machines, disks and drivers are lost, and the bytes stay the same."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from uuid import uuid4

import pytest
from integration.cloud.emulators import outside_of_clouds, s3_env
from integration.cloud.faulty_proxy import Proxy, proxy_to
from integration.cloud.ray_cluster import RayCluster, ray_cluster
from limits import HANG_S

from embark.data.prepared import Manifest
from embark.store import open_store

pytestmark = pytest.mark.slow

NUM_MACHINES, NUM_FILES = 3, 12
SPEC = """
[data]
kind = "prepared"
path = "{path}"
[data.prepare]
input = "{input}"
executor = "{executor}"
num_workers = {num_workers}
"""


class Gate:
    """Holds back the requests that write the records of tasks of a kind, beyond the first `num_let` of them."""

    def __init__(self, proxy: Proxy, kind: str, num_let: int = 0) -> None:
        self._kind, self._num_let, self._answer = f"/.preparing/{kind}/", num_let, ""
        self._open, self._lock = threading.Event(), threading.Lock()
        self.let: list[str] = []
        self.held: list[str] = []
        proxy.fault = self._choose

    def _choose(self, method: str, path: str) -> str:
        if method == "PUT" and self._kind in path:
            with self._lock:
                is_let = len(self.let) < self._num_let or self._open.is_set()
                (self.let if is_let else self.held).append(path)
            if not is_let:
                self._open.wait(HANG_S)
                return self._answer
        return ""

    def open(self, answer: str = "") -> None:
        """Let them all through, or answer them with a fault."""
        self._answer = answer
        self._open.set()


class Terminal:
    """Where `embark data prepare` is called."""

    def __init__(self, folder: Path, env: dict[str, str]) -> None:
        self.folder, self.env = folder, env

    def start(self, path: str, input: str, executor: str = "ray", num_workers: int = 0) -> subprocess.Popen[str]:
        spec = self.folder / f"{uuid4().hex}.toml"
        spec.write_text(SPEC.format(path=path, input=input, executor=executor, num_workers=num_workers))
        return subprocess.Popen([sys.executable, "-m", "embark", "data", "prepare", str(spec)], env=self.env, text=True,
                                cwd=self.folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE)

    def prepare(self, *words: str, code: int = 0) -> str:
        return ended(self.start(*words), code)


def ended(process: subprocess.Popen[str], code: int = 0) -> str:
    said, errors = process.communicate(timeout=HANG_S)
    assert process.returncode == code, (said + errors)[-4000:]
    assert "Traceback" not in errors
    return errors


def until(is_so: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    end_s = time.monotonic() + HANG_S
    while not is_so():
        assert time.monotonic() < end_s
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)


def content(uri: str) -> dict[str, bytes | str]:
    store = open_store(uri)
    found: dict[str, bytes | str] = {entry.path: store.read(entry.path) for entry in store.list()}
    return found | {"manifest.json": Manifest.from_text(found["manifest.json"].decode(), "").fingerprint()}


@pytest.fixture
def proxy(s3_emulator, environment) -> Iterator[Proxy]:
    with proxy_to(s3_emulator.port) as proxy:
        environment(s3_env(proxy.port))
        yield proxy


@pytest.fixture
def small_disk(tmp_path) -> Iterator[Path]:
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)], capture_output=True)
    if mounted.returncode:
        pytest.skip("only root may mount a small disk")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def test_a_ray_cluster_prepares_the_same_bytes_whatever_is_lost(
    tmp_path, proxy, small_disk, warm_ray_python
):
    """One cluster for all of it: its start is what takes time."""
    draw = random.Random(1)
    bucket = f"s3://models/{uuid4().hex}"
    (tmp_path / "raw").mkdir()
    for i in range(NUM_FILES):
        rows = [f"{draw.randrange(2)},{draw.choice(['', draw.random()])},u{draw.randrange(9_000)},s{draw.randrange(99)}"
                for _ in range(3_000)]
        (tmp_path / "raw" / f"{i:02d}.csv").write_text("\n".join(["label,price,user,shop", *rows]) + "\n")
        open_store(bucket).write(f"raw/{i:02d}.csv", tmp_path / "raw" / f"{i:02d}.csv")
    here = Terminal(tmp_path, {**os.environ, "HOME": str(tmp_path)})
    here.prepare(f"{tmp_path}/here", f"{tmp_path}/raw", "local")
    expected = content(f"{tmp_path}/here")
    with ray_cluster(warm_ray_python, (1,) * NUM_MACHINES) as cluster:
        here.env["RAY_ADDRESS"] = cluster.address
        a_killed_machine_loses_nothing(here, cluster, proxy, bucket, expected)
        a_killed_driver_is_continued(here, proxy, bucket, expected)
        a_full_disk_is_one_line_and_goes_on(here, small_disk, expected)
    said = here.prepare(f"{bucket}/other", f"{bucket}/raw", code=64)
    assert f"error: no Ray cluster at {cluster.address}: [Errno 111] Connection refused" in said


def a_killed_machine_loses_nothing(
    here: Terminal, cluster: RayCluster, proxy: Proxy, bucket: str, expected: dict[str, bytes | str]
) -> None:
    gate = Gate(proxy, "stage", num_let=2)
    driver = here.start(f"{bucket}/lost", f"{bucket}/raw")
    until(lambda: len(gate.held) >= NUM_MACHINES, driver)  # Each machine is about to end a task.
    cluster.kill(0)
    gate.open()
    ended(driver)
    written = Counter(gate.let + gate.held)
    assert len(written) == NUM_FILES
    assert max(written.values()) > 1  # The lost machine's task was done again.
    assert content(f"{bucket}/lost") == expected


def a_killed_driver_is_continued(
    here: Terminal, proxy: Proxy, bucket: str, expected: dict[str, bytes | str]
) -> None:
    gate = Gate(proxy, "stage", num_let=4)
    driver = here.start(f"{bucket}/stopped", f"{bucket}/raw")
    until(lambda: len(gate.let) == 4 and bool(gate.held), driver)
    driver.send_signal(signal.SIGKILL)
    driver.communicate(timeout=HANG_S)
    done = {entry.path for entry in open_store(f"{bucket}/stopped/.preparing/stage").list()}
    assert done
    again = Gate(proxy, "stage", num_let=NUM_FILES * 9)
    here.prepare(f"{bucket}/stopped", f"{bucket}/raw")
    gate.open("reset")
    redone = {path.rpartition("/")[2].partition("?")[0] for path in again.let}
    assert redone
    assert not redone & done
    assert content(f"{bucket}/stopped") == expected


def a_full_disk_is_one_line_and_goes_on(here: Terminal, disk: Path, expected: dict[str, bytes | str]) -> None:
    said = here.prepare(f"{disk}/out", f"{here.folder}/raw", code=70)
    assert said.count("error: ") == 1
    assert f"could not write {disk}/out: no space left on device" in said
    assert "fix: free some space, or write to a larger disk (data.path), and run the same command again" in said
    subprocess.run(["mount", "-o", "remount,size=100m", str(disk)], check=True)
    here.prepare(f"{disk}/out", f"{here.folder}/raw")
    assert content(f"{disk}/out") == expected


def test_a_bucket_that_is_not_there_is_one_line(tmp_path, proxy):
    (tmp_path / "in.csv").write_text("label,user\n" + "0,a\n1,b\n" * 50)
    here = Terminal(tmp_path, {**os.environ, **outside_of_clouds(tmp_path), **s3_env(proxy.port)})
    said = here.prepare("s3://no-such-bucket/out", f"{tmp_path}/in.csv", "local", code=64)
    assert said.count("error: ") == 1
    assert "the bucket or container does not exist" in said
