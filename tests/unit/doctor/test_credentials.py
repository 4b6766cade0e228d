"""Sources of credentials are named; what they hold never is."""

from __future__ import annotations

import pytest

from embark.doctor.credentials import check_credentials

SECRET = "Wq7-do-not-show-me-Zx9"


def found(machine):
    (check,) = check_credentials(machine.host)
    assert SECRET not in check.found + check.fix
    return check


def test_none_are_needed(machine):
    check = found(machine)
    assert (check.verdict, check.found) == ("ok", "none found: local files need none")


@pytest.mark.parametrize(("env", "text"), [
    ({"AWS_ACCESS_KEY_ID": SECRET, "AWS_SECRET_ACCESS_KEY": SECRET}, "aws: the environment's key"),
    ({"AWS_PROFILE": "team"}, "aws: AWS_PROFILE"),
    ({"AWS_CONTAINER_CREDENTIALS_FULL_URI": "http://169.254.170.23/v1/credentials"},
     "aws: the container's role (Pod Identity)"),
    ({"AZURE_STORAGE_ACCOUNT_KEY": SECRET}, "azure: AZURE_STORAGE_ACCOUNT_KEY"),
    ({"AZURE_CLIENT_ID": "x", "AZURE_CLIENT_SECRET": SECRET}, "azure: the environment's service principal"),
])
def test_what_the_environment_has_is_named(machine, env: dict[str, str], text: str):
    machine.env |= env
    check = found(machine)
    assert (check.verdict, check.found) == ("ok", text)


@pytest.mark.parametrize(("path", "text"), [
    (".aws/credentials", "aws: ~/.aws/credentials"), (".aws/config", "aws: ~/.aws/config"),
    (".config/gcloud/application_default_credentials.json", "gcp: gcloud auth application-default login"),
])
def test_what_the_clouds_own_tools_left_is_named(machine, path: str, text: str):
    file = machine.home / path
    file.parent.mkdir(parents=True)
    file.write_text(SECRET)
    file.chmod(0o600)
    check = found(machine)
    assert (check.verdict, check.found) == ("ok", text)


@pytest.mark.parametrize(("text", "message"), [
    ('\ufeff{"installationId": "x", "subscriptions": [{"id": "Wq7-do-not-show-me-Zx9", "state": "Enabled"}]}',
     "azure: az login"),
    ('\ufeff{"installationId": "x"}', "none found"), ('{"subscriptions": []}', "none found"), ("{", "none found"),
    ("[]", "none found"),
], ids=["logged in", "az was run once", "logged out", "cut", "odd"])
def test_az_counts_only_after_a_login(machine, text: str, message: str):
    file = machine.home / ".azure" / "azureProfile.json"
    file.parent.mkdir(parents=True)
    file.write_text(text, encoding="utf-8")
    assert found(machine).found.startswith(message)


@pytest.mark.parametrize("name", [
    "AWS_WEB_IDENTITY_TOKEN_FILE", "AZURE_FEDERATED_TOKEN_FILE", "GOOGLE_APPLICATION_CREDENTIALS",
])
def test_a_file_that_is_named_must_be_there(machine, name: str):
    machine.env[name] = "/var/run/secrets/token"
    check = found(machine)
    assert check.verdict == "wrong"
    assert name in check.found
    machine.has("/var/run/secrets/token", SECRET)
    assert found(machine).verdict == "ok"


@pytest.mark.parametrize(("has", "lacks"), [
    ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"), ("AWS_SECRET_ACCESS_KEY", "AWS_ACCESS_KEY_ID"),
])
def test_half_a_key_is_wrong(machine, has: str, lacks: str):
    machine.env[has] = SECRET
    check = found(machine)
    assert check.verdict == "wrong"
    assert f"{lacks} is not set" in check.found


def test_a_key_file_that_others_can_read_is_a_warning(machine):
    file = machine.home / ".aws/credentials"
    file.parent.mkdir()
    file.write_text(SECRET)
    file.chmod(0o644)
    check = found(machine)
    assert check.verdict == "warning"
    assert check.fix == "chmod 600 ~/.aws/credentials"
