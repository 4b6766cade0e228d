"""What a store or the way to it does wrong is waited out, or told in one sentence with its fix, in bounded time."""

from __future__ import annotations

import os
import traceback
from dataclasses import replace

import pytest
from integration.cloud.conftest import HASTY
from integration.cloud.emulators import SECRET, s3_env
from integration.cloud.faulty_proxy import Proxy, proxy_to

from embark.errors import EmbarkError, Fault, UserError
from embark.store import ObjectStore, open_store

TOKEN = "session-token-" + SECRET


@pytest.fixture
def proxy(s3_emulator):
    with proxy_to(s3_emulator.port) as proxy:
        yield proxy


@pytest.fixture
def store(proxy: Proxy, environment) -> ObjectStore:
    environment({**s3_env(proxy.port), "AWS_SESSION_TOKEN": TOKEN})
    return open_store(f"s3://models/faults-{proxy.port}", replace(HASTY, silence_s=0.5, request_s=3, give_up_s=5))


def everything_of(error: EmbarkError) -> str:
    """All that any printing of it could show."""
    return "".join(traceback.format_exception(error)) + str(error) + repr(error) + repr(vars(error))


@pytest.mark.parametrize("fault", ["503", "429", "reset", "hang"])
def test_a_passing_fault_is_waited_out(store, proxy, fault):
    proxy.fail(fault, 2)
    store.write("a", b"0123456789")
    proxy.fail(fault, 2)
    assert store.read("a") == b"0123456789"
    proxy.fail(fault, 2)
    assert store.read_range("a", 2, 3) == b"234"
    proxy.fail(fault, 2)
    assert [entry.path for entry in store.list()] == ["a"]


def test_faults_of_several_kinds_in_a_row_are_waited_out(store, proxy):
    """A delete of many is a POST: obstore sends it again after a 503, but not after a reset."""
    store.write("a", b"1")
    faults = iter(["503", "reset", "503", "reset"])
    proxy.fault = lambda method, path: next(faults, "")
    store.delete("a")
    assert not store.exists("a")
    assert next(faults, None) is None


@pytest.fixture
def big(tmp_path):
    path = tmp_path / "big"
    path.write_bytes(os.urandom(1 << 20) * 20)
    return path


@pytest.fixture
def calm_store(store) -> ObjectStore:
    """One that waits for an answer longer than a busy machine takes to give it."""
    return open_store(store.uri, HASTY)


def test_a_passing_fault_amid_a_large_upload_is_waited_out(calm_store, proxy, big):
    proxy.fail("503", 3, method="PUT")
    calm_store.write("big", big)
    assert calm_store.read("big") == big.read_bytes()


@pytest.mark.parametrize("as_pieces", [False, True])
@pytest.mark.parametrize("has_old", [False, True])
def test_an_upload_whose_last_answer_is_lost_is_known_to_be_done(calm_store, proxy, big, as_pieces, has_old):
    data = big.read_bytes()
    if has_old:
        calm_store.write("big", bytes(len(data)))
    is_last = iter([True])
    proxy.fault = lambda method, path: "lost" if method == "POST" and "uploadId" in path and next(is_last, 0) else ""
    calm_store.write("big", iter([data]) if as_pieces else big, len(data))
    assert next(is_last, None) is None
    assert calm_store.read("big") == data


@pytest.mark.parametrize("has_old", [False, True])
def test_an_upload_that_the_store_dropped_is_a_fault(calm_store, proxy, big, has_old):
    if has_old:
        calm_store.write("big", bytes(20 << 20))
    proxy.fault = lambda method, path: "dropped" if method == "POST" and "uploadId" in path else ""
    with pytest.raises(Fault, match=r"could not write .* the store has dropped the upload"):
        calm_store.write("big", big)


@pytest.mark.parametrize("fault", ["503", "reset", "hang"])
@pytest.mark.parametrize("operation", ["read", "write", "list", "delete"])
def test_a_lasting_fault_is_reported_after_four_attempts(store, proxy, fault, operation):
    store.write("a", b"x")
    proxy.fail(fault, 1_000_000)
    call = {"read": lambda: store.read("a"), "write": lambda: store.write("a", b"y"), "list": lambda: store.list("a"),
            "delete": lambda: store.delete("a")}[operation]
    with pytest.raises(Fault, match=rf"could not {operation} s3://models/faults-\d+/a in 4 attempts: .{{5}}") as caught:
        call()
    assert "start again" in caught.value.fix
    assert SECRET not in everything_of(caught.value)
    assert "Debug" not in str(caught.value)


def test_a_write_that_fails_leaves_the_old_file(calm_store, proxy, big):
    calm_store.write("a", b"old")
    proxy.fault = lambda method, path: "503" if method == "PUT" and "partNumber=2" in path else ""
    with pytest.raises(Fault):
        calm_store.write("a", big)
    proxy.fault = lambda method, path: ""
    assert calm_store.read("a") == b"old"


@pytest.mark.parametrize(("fault", "says", "fix"), [("expired", "credentials have expired", "renew"),
                                                    ("denied", "access is denied", "identity")])
def test_refused_credentials_say_what_to_renew_and_are_not_shown(store, proxy, fault, says, fix):
    proxy.fail(fault, 1_000_000)
    for call in (lambda: store.read("a"), lambda: store.write("a", b"x"), store.list, store.check):
        with pytest.raises(Fault, match=says) as caught:
            call()
        assert fix in caught.value.fix
        shown = everything_of(caught.value)
        assert SECRET not in shown
        assert TOKEN not in shown
        assert caught.value.__context__ is None


def test_the_secret_was_there_to_be_shown(store, proxy):
    proxy.fail("expired", 1)
    with pytest.raises(Fault):
        store.list()
    assert proxy.seen[0][2]["x-amz-security-token"] == TOKEN


@pytest.mark.parametrize("fault", ["cut", "short"])
def test_a_truncated_answer_is_never_taken_for_the_complete(store, proxy, fault, tmp_path):
    data = os.urandom(300_000)
    store.write("a", data)
    into = tmp_path / "a"
    proxy.fail(fault, 1_000_000, method="GET")
    for call in (lambda: store.read_range("a", 0, 200_000), lambda: store.download("a", into)):
        with pytest.raises(Fault, match=r"could not|shorter|bytes early"):
            call()
    assert not into.exists()
    assert not list(tmp_path.glob(".*"))


def test_a_connection_that_breaks_amid_an_answer_is_asked_for_the_rest(store, proxy, tmp_path):
    data = os.urandom(300_000)
    store.write("a", data)
    for call in (lambda: store.read("a"), lambda: store.read_range("a", 0, len(data))):
        proxy.fail("cut", 1, method="GET")
        assert call() == data
    proxy.fail("cut", 1, method="GET")
    store.download("a", tmp_path / "a")
    assert (tmp_path / "a").read_bytes() == data


@pytest.mark.parametrize("kind", ["s3", "gs_xml"])
def test_a_bucket_that_is_not_there_is_the_users_mistake(kind, request, environment):
    emulator = request.getfixturevalue(f"{kind}_emulator")
    environment(emulator.env)
    store = open_store(f"{emulator.uri}-nowhere/x", HASTY)
    for call in (lambda: store.write("a", b"x"), store.list, lambda: store.read("a"), store.check):
        with pytest.raises(UserError, match="bucket or container does not exist") as caught:
            call()
        assert "create it" in caught.value.fix


@pytest.mark.needs("azurite")
def test_azure_refuses_a_wrong_signature_without_showing_it(az_emulator, environment):
    environment({
        "AZURE_STORAGE_ACCOUNT_NAME": "devstoreaccount1",
        "AZURE_STORAGE_ENDPOINT": f"http://127.0.0.1:{az_emulator.port}/devstoreaccount1",
        "AZURE_STORAGE_SAS_TOKEN": f"sv=2021-12-02&sp=rw&sig={SECRET}",
    })
    store = open_store("az://models/x", HASTY)
    for call in (lambda: store.read("a"), lambda: store.write("a", b"x"), store.list):
        with pytest.raises(Fault, match=r"denied|not valid") as caught:
            call()
        assert SECRET not in everything_of(caught.value)


@pytest.mark.needs("azurite")
def test_an_azure_container_that_is_not_there_is_the_users_mistake(az_emulator, environment):
    environment(az_emulator.env)
    with pytest.raises(UserError, match="bucket or container does not exist"):
        open_store("az://nowhere/x", HASTY).write("a", b"x")


def test_a_server_that_is_not_there_is_a_fault(environment):
    environment(s3_env(1))
    with pytest.raises(Fault, match="could not read s3://models/x/a in 4 attempts"):
        open_store("s3://models/x", HASTY).read("a")


def test_a_profile_signs_where_the_environment_has_no_keys(proxy, environment, tmp_path):
    profile = tmp_path / "credentials"
    profile.write_text(f"[training]\naws_access_key_id = AKIAPROFILE\naws_secret_access_key = {SECRET}\n")
    env = {name: value for name, value in s3_env(proxy.port).items() if "KEY" not in name}
    environment({**env, "AWS_PROFILE": "training", "AWS_SHARED_CREDENTIALS_FILE": str(profile)})
    open_store("s3://models/profile", HASTY).write("a", b"x")
    assert "Credential=AKIAPROFILE/" in proxy.seen[-1][2]["authorization"]


def test_a_profile_that_is_not_there_is_the_users_mistake(environment):
    environment({"AWS_PROFILE": "nobody", "AWS_REGION": "us-east-1"})
    with pytest.raises(UserError, match="nobody"):
        open_store("s3://models/profile", HASTY)
