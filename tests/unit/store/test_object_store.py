"""The store to a folder, which store a uri opens, and what is never said."""

from __future__ import annotations

import errno
import gc
import os
import re
import subprocess
import sys
import textwrap
import weakref
from pathlib import Path

import pytest
from limits import HANG_S

from embark.errors import Fault, MissingPackage, UserError
from embark.store import open_store
from embark.store.cloud_store import CloudStore
from embark.store.errors import NotFound, RetriesExhausted, RetryPolicy, call_with_retries, explain
from embark.store.fsspec_store import FsspecStore
from embark.store.object_store import LocalStore


@pytest.fixture(autouse=True)
def _no_cloud(monkeypatch, tmp_path):
    for name in list(os.environ):
        if name.startswith(("AWS_", "AZURE_", "GOOGLE_", "STORAGE_EMULATOR")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))


@pytest.mark.parametrize(
    ("uri", "kind"),
    [("runs", LocalStore), ("file:///data/x", LocalStore), ("s3://b/p", CloudStore), ("gs://b", CloudStore),
     ("az://c/p", CloudStore), ("memory://x", FsspecStore)],
)
def test_the_scheme_chooses_the_door(uri, kind, monkeypatch):
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "account")
    assert type(open_store(uri)) is kind


def test_a_file_uri_is_decoded_and_is_of_this_machine():
    assert str(open_store("file:///data/a%20b").root) == "/data/a b"
    with pytest.raises(UserError, match="another machine"):
        open_store("file://other/data")


@pytest.mark.parametrize(
    ("uri", "says"),
    [("nosuch://x", "no store has the scheme nosuch://"), ("s3:///p", "names no bucket"),
     ("az://c/p", "AZURE_STORAGE_ACCOUNT_NAME")],
)
def test_a_uri_that_leads_nowhere_is_the_users_mistake_with_its_fix(uri, says):
    with pytest.raises(UserError, match=re.escape(says)) as caught:
        open_store(uri)
    assert caught.value.fix


@pytest.mark.parametrize(
    "uri", ["s3://AKIA:hunter22@bucket/p", "az://c/p?sv=1&sig=hunter22", "gs://b/p?x=hunter22", "sftp://me:hunter22@h/p"]
)
def test_a_uri_with_a_secret_is_refused_and_not_repeated(uri):
    with pytest.raises(UserError, match="credentials") as caught:
        open_store(uri)
    assert "hunter22" not in str(caught.value)


def test_without_obstore_it_says_what_to_install(monkeypatch):
    monkeypatch.delitem(sys.modules, "embark.store.cloud_store", raising=False)
    monkeypatch.setitem(sys.modules, "obstore", None)
    monkeypatch.setitem(sys.modules, "obstore.store", None)
    with pytest.raises(MissingPackage, match=r"embark-rec\[cloud\]"):
        open_store("s3://bucket/p")


def test_a_write_that_is_killed_leaves_the_old_file(tmp_path):
    store = open_store(tmp_path)
    store.write("a", b"old")
    code = textwrap.dedent("""
        import os, sys
        from embark.store import open_store
        def pieces():
            yield b"new" * 1000000
            os.kill(os.getpid(), 9)
        open_store(sys.argv[1]).write("a", pieces())
    """)
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], timeout=HANG_S)
    assert done.returncode == -9
    assert store.read("a") == b"old"
    assert len(list(tmp_path.iterdir())) == 2
    assert [entry.path for entry in store.list()] == ["a"]


def test_bytes_are_on_the_disk_before_the_name_is(tmp_path, monkeypatch):
    order: list[str] = []
    fsync, replace = os.fsync, Path.replace
    monkeypatch.setattr(os, "fsync", lambda fd: (order.append("fsync"), fsync(fd)))
    monkeypatch.setattr(Path, "replace", lambda a, b: (order.append("replace"), replace(a, b))[1])
    open_store(tmp_path).write("a", b"x")
    assert order == ["fsync", "replace", "fsync"]


def test_a_full_disk_is_a_fault_and_a_forbidden_place_a_mistake():
    full = explain(OSError(errno.ENOSPC, "x"), "write", "/data/a")
    assert isinstance(full, Fault)
    assert "no space left" in full.what
    assert "free some space" in full.fix
    assert isinstance(explain(PermissionError(errno.EACCES, "x"), "write", "/data/a"), UserError)
    assert isinstance(explain(FileNotFoundError(errno.ENOENT, "x"), "read", "/data/a"), NotFound)


def test_a_file_where_a_folder_should_be_is_a_mistake(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(UserError, match="could not write"):
        open_store(tmp_path / "file").write("a", b"x")


def test_a_failed_download_leaves_nothing(tmp_path):
    with pytest.raises(NotFound):
        open_store(tmp_path / "store").download("a", tmp_path / "here" / "a")
    assert not list((tmp_path / "here").iterdir())


def test_an_error_does_not_keep_what_its_caller_held(tmp_path):
    """A version that is replaced while a file is absent would stay in memory until garbage is collected."""
    def size_of_absent_file(held: set[int]) -> None:
        with pytest.raises(NotFound):
            open_store(str(tmp_path)).size("absent")

    held = {1}
    released = weakref.ref(held)
    gc.disable()
    try:
        size_of_absent_file(held)
        del held
        assert released() is None
    finally:
        gc.enable()


def test_a_download_continues_where_the_disk_took_only_a_part(tmp_path, monkeypatch):
    store = open_store("memory://short-writes")
    data = os.urandom(100_000)
    store.write("a", data)
    pwrite = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, piece, start: pwrite(fd, piece[:999], start))
    store.download("a", tmp_path / "a")
    assert (tmp_path / "a").read_bytes() == data


def test_patience_retries_what_may_pass_and_counts(monkeypatch):
    waits: list[float] = []
    monkeypatch.setattr("time.sleep", waits.append)
    calls = 0

    def fails_twice() -> str:
        nonlocal calls
        calls += 1
        if calls < 3:
            raise TimeoutError("slow")
        return "done"

    retry = RetryPolicy(max_retries=3, first_wait_s=1, longest_wait_s=3)
    assert call_with_retries(fails_twice, retry, lambda error: True) == "done"
    assert 0.5 <= waits[0] <= 1 <= waits[1] <= 2

    def fails() -> None:
        raise TimeoutError("slow")

    with pytest.raises(RetriesExhausted) as caught:
        call_with_retries(fails, retry, lambda error: True)
    assert caught.value.attempts == 4
    assert max(waits) <= 3
    problem = explain(caught.value, "read", "x://y")
    assert str(problem).startswith("could not read x://y in 4 attempts: slow")
    with pytest.raises(TimeoutError):
        call_with_retries(fails, retry, lambda error: False)


@pytest.mark.parametrize(
    ("code", "kind", "fix"),
    [("NoSuchBucket", UserError, "create it"), ("ContainerNotFound", UserError, "create it"),
     ("ExpiredToken", Fault, "renew"), ("AccessDenied", Fault, "identity"),
     ("PermanentRedirect", UserError, "AWS_REGION"), ("InvalidAccessKeyId", Fault, "renew"),
     ("RequestTimeTooSkewed", Fault, "clock"), ("SlowDown", Fault, "network")],
)
def test_what_a_store_answers_is_reported_with_its_fix(code, kind, fix):
    text = f"Generic S3 error: … - Server returned: <Error><Code>{code}</Code><Message>Why.</Message></Error>"
    error = explain(Exception(text + "\n\nDebug source:\nretries: 2, max_retries: 2"), "write", "s3://b/x")
    assert type(error) is kind
    assert fix in error.fix
    assert "could not write s3://b/x in 3 attempts: " in error.what
    assert f"{code}: Why." in error.what
