"""A file is complete and on disk before it has its name, and the name is on disk too."""

import os
import signal
import subprocess
import sys

from limits import HANG_S

from embark.store.atomic_file import commit, scratch_folder_for

KILLED = """
import os, signal, sys
from pathlib import Path
from embark.store.atomic_file import scratch_folder_for
with scratch_folder_for(Path(sys.argv[1])) as scratch:
    (scratch / "half").write_bytes(b"rows")
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_an_open_file_is_synced_then_renamed_then_its_directory_is_synced(tmp_path, monkeypatch):
    path, order = tmp_path / "a.bin", []
    fsync, replace = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda fd: (order.append("fsync"), fsync(fd)))
    monkeypatch.setattr(os, "replace", lambda old, new: (order.append("replace"), replace(old, new)))
    file = open(f"{path}.part", "wb")  # noqa: SIM115
    file.write(b"rows")
    commit(file, path)
    assert order == ["fsync", "replace", "fsync"]
    assert file.closed
    assert [(one.name, one.read_bytes()) for one in tmp_path.iterdir()] == [("a.bin", b"rows")]


def test_a_scratch_folder_of_a_killed_process_is_deleted_by_the_next(tmp_path):
    for name in ("model", "model", "model.onnx"):
        done = subprocess.run([sys.executable, "-c", KILLED, tmp_path / name], check=False, timeout=HANG_S)
        assert done.returncode == -signal.SIGKILL
    others = [".model.0123456789ab", "tmpabcd1234", ".model.012345678901.embark-part"]
    for name in others[:2]:
        (tmp_path / name).mkdir()
    (tmp_path / others[2]).write_text("a file that a process is writing")
    with scratch_folder_for(tmp_path / "model") as one, scratch_folder_for(tmp_path / "model") as two:
        assert one.is_dir()  # of a process that lives
        assert two.is_dir()
        left = {path.name for path in tmp_path.iterdir()} - {one.name, two.name, *others}
        assert [name.startswith(".model.onnx.") for name in left] == [True]
    assert {path.name for path in tmp_path.iterdir()} == {*others, *left}
