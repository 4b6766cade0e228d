"""What compilers keep is shared by all runs of a user, and a user without a writable home can train."""

from pathlib import Path

import pytest

from embark.store.run_dir import compiled_code_folder


def test_compiled_code_is_kept_in_the_users_cache_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = compiled_code_folder("triton", tmp_path / "run")
    assert folder == tmp_path / "cache" / "embark" / "triton"
    assert folder.is_dir()


def test_without_a_place_to_write_there_it_is_kept_with_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert compiled_code_folder("triton", tmp_path / "run") == tmp_path / "run"
