"""Embark's own wheel: the same each time, valid for pip, and whole."""

from __future__ import annotations

import base64
import email
import hashlib
import io
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from limits import HANG_S

import embark
from embark.errors import UserError
from embark.render import wheel
from embark.render.wheel import wheel_bytes, wheel_name

ROOT = Path(__file__).parents[3]
INFO = f"embark_rec-{embark.__version__}.dist-info"


@pytest.fixture
def archive():
    with zipfile.ZipFile(io.BytesIO(wheel_bytes())) as opened:
        yield opened


@pytest.fixture
def fresh():
    """No wheel of an earlier test is taken, and none is left for a later one."""
    wheel_bytes.cache_clear()
    yield
    wheel_bytes.cache_clear()


def requirements(text: str) -> set[str]:
    return {" ".join(row.split()) for row in email.message_from_string(text).get_all("Requires-Dist")}


def test_the_same_code_gives_the_same_wheel(fresh):
    first = wheel_bytes()
    wheel_bytes.cache_clear()
    assert wheel_bytes() == first


def test_it_has_every_file_of_the_package_and_nothing_else(archive):
    listed = subprocess.run(["git", "ls-files", "--cached", "--others", "--exclude-standard", "src/embark"], cwd=ROOT,
                            capture_output=True, text=True, check=True).stdout.split()
    sources = {name.removeprefix("src/") for name in listed if (ROOT / name).exists()}
    assert {name for name in archive.namelist() if not name.startswith(INFO)} == sources


def test_the_simulated_accounts_are_in_no_wheel(archive):
    assert not [name for name in archive.namelist() if "cloudsim" in name or "rehearse/account/" in name]
    hatch = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]
    assert hatch["wheel"]["packages"] == ["src/embark"]
    assert "cloudsim" not in hatch["sdist"]["include"]


def test_the_record_has_the_checksum_of_every_file(archive):
    rows = [line.split(",") for line in archive.read(f"{INFO}/RECORD").decode().splitlines()]
    assert {name for name, *_ in rows} == set(archive.namelist())
    for name, checksum, size in rows:
        if not name.endswith("RECORD"):
            data = archive.read(name)
            digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
            assert (checksum, int(size)) == (f"sha256={digest}", len(data))


def test_metadata_is_pyproject_s_and_not_that_of_an_editable_install(archive):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    text = archive.read(f"{INFO}/METADATA").decode()
    found = email.message_from_string(text)
    assert (found["Name"], found["Version"]) == ("embark-rec", embark.__version__)
    assert found.get_all("Provides-Extra") == list(project["optional-dependencies"])
    assert set(project["dependencies"]) <= requirements(text)
    assert "boto3>=1.35; extra == 'cloud'" in requirements(text)
    assert archive.read(f"{INFO}/entry_points.txt") == b"[console_scripts]\nembark = embark.__main__:main\n"


def test_pip_installs_it_without_an_index_and_it_packs_itself_again(tmp_path):
    """Into a folder of its own, from which `embark` then starts and packs its wheel again."""
    (tmp_path / wheel_name()).write_bytes(wheel_bytes())
    site, again = tmp_path / "site", tmp_path / "again.whl"
    subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--no-compile",
                    "--target", site, tmp_path / wheel_name()], check=True, timeout=HANG_S)
    code = ("import embark, sys; from pathlib import Path; from embark.render.wheel import wheel_bytes\n"
            f"assert embark.__file__.startswith({str(site)!r}), embark.__file__\n"
            f"Path({str(again)!r}).write_bytes(wheel_bytes())\n"
            "sys.argv = ['embark', '--version']; from embark.__main__ import main; main()")
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env={"PYTHONPATH": str(site)},
                          capture_output=True, text=True, timeout=HANG_S)
    assert embark.__version__ in done.stdout, done.stderr
    assert (site / "bin/embark").exists()
    assert again.read_bytes() == wheel_bytes()


def test_code_that_was_neither_cloned_nor_installed_is_refused(tmp_path, monkeypatch, fresh):
    (tmp_path / "lib/embark").mkdir(parents=True)
    monkeypatch.setattr(embark, "__file__", str(tmp_path / "lib/embark/__init__.py"))
    monkeypatch.setattr(wheel, "DISTRIBUTION", "embark-rec-elsewhere")
    with pytest.raises(UserError, match="cannot be packed"):
        wheel_bytes()


def test_the_quickstart_s_requirements_find_the_rendered_wheel(tmp_path):
    text = (ROOT / "examples/cloud_deployment/quickstart/requirements.txt").read_text()
    ours = [line for line in text.splitlines() if "embark" in line or line.startswith("--")]
    (tmp_path / "quickstart/dist").mkdir(parents=True)
    (tmp_path / "quickstart/requirements.txt").write_text("\n".join(ours))
    install = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--no-index", "--no-deps",
               "--requirement", tmp_path / "quickstart/requirements.txt"]
    missing = subprocess.run(install, cwd=tmp_path, capture_output=True, text=True, timeout=HANG_S)
    assert missing.returncode != 0
    (tmp_path / "quickstart/dist" / wheel_name()).write_bytes(wheel_bytes())
    found = subprocess.run(install, cwd=tmp_path, capture_output=True, text=True, timeout=HANG_S)
    assert f"Would install embark-rec-{embark.__version__}" in found.stdout, found.stderr
