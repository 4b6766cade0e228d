"""A run in an object store is exported by a machine that has neither its data nor its spec."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from exported_runs import draw_rows, prepared_spec, write_csv
from limits import HANG_S

from embark.export.artifact import open_artifact
from embark.spec import to_toml
from embark.store import open_store

pytestmark = pytest.mark.slow


def embark(*words: str, home: Path) -> subprocess.CompletedProcess[str]:
    """Run the command as another machine would: another home, so that nothing is in a cache."""
    home.mkdir(exist_ok=True)
    return subprocess.run(
        [sys.executable, "-m", "embark", *words], cwd=home, text=True, capture_output=True, timeout=HANG_S,
        env={**os.environ, "HOME": str(home), "EMBARK_CACHE": str(home / "cache"), "XDG_CACHE_HOME": str(home / "xdg")})


def test_a_run_is_exported_and_evaluated_where_its_data_is_not(s3_emulator, environment, tmp_path):
    """The trainer reads a volume that this machine does not mount, as pods of the cloud guides do."""
    environment(s3_emulator.env)
    volume = tmp_path / "mnt"
    volume.mkdir()
    rows = draw_rows(400, 1)
    files = [write_csv(tmp_path / name, some) for name, some in (("train.csv", rows[:300]), ("later.csv", rows[300:]))]
    root = f"{s3_emulator.uri}/elsewhere"
    spec = prepared_spec(volume, *files, store={"root": root})
    (tmp_path / "run.toml").write_text(to_toml(spec, only_set=True))
    trained = embark("train", str(tmp_path / "run.toml"), home=tmp_path / "pod")
    assert trained.returncode == 0, trained.stderr
    near = embark("export", f"{root}/clicks", "--to", str(tmp_path / "near"), home=tmp_path / "pod")
    assert near.returncode == 0, near.stderr
    shutil.rmtree(volume)
    (tmp_path / "run.toml").unlink()

    far = embark("export", f"{root}/clicks", home=tmp_path / "laptop")
    assert far.returncode == 0, far.stderr
    environment(s3_emulator.env)
    here, there = open_artifact(str(tmp_path / "near")), open_artifact(f"{root}/clicks/export")
    assert (here.folder / "id_maps.safetensors").read_bytes() == (there.folder / "id_maps.safetensors").read_bytes()
    assert here.info.rows == there.info.rows
    later = embark("evaluate", f"{root}/clicks", "--data", str(files[1]), home=tmp_path / "laptop")
    assert later.returncode == 0, later.stderr

    open_store(f"{root}/clicks").delete_prefix("data")
    refused = embark("export", f"{root}/clicks", home=tmp_path / "laptop")
    assert refused.returncode == 64
    assert f"copy its manifest.json and ids/ to {root}/clicks/data/" in " ".join(refused.stderr.split())
