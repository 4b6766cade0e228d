"""Finds the clouds that this machine has credentials for, and their sources, by name only: never a secret."""

import json
import stat
from collections.abc import Iterator
from dataclasses import dataclass

from embark.doctor.host import Check, Host

AWS_CREDENTIALS, AWS_CONFIG = ".aws/credentials", ".aws/config"
GCLOUD_CREDENTIALS = ".config/gcloud/application_default_credentials.json"
TOKEN_FILES = {
    "AWS_WEB_IDENTITY_TOKEN_FILE": "a role for the service account (IRSA)",
    "AZURE_FEDERATED_TOKEN_FILE": "workload identity", "GOOGLE_APPLICATION_CREDENTIALS": "a key file",
}
"""The variables that name a file, and what the file is."""
AZURE_KEYS = ("AZURE_STORAGE_ACCOUNT_KEY", "AZURE_STORAGE_ACCESS_KEY", "AZURE_STORAGE_SAS_KEY",
              "AZURE_STORAGE_CONNECTION_STRING")


@dataclass(frozen=True, slots=True)
class Broken:
    """A source that cannot be used."""

    why: str
    fix: str


def check_credentials(host: Host) -> Iterator[Check]:
    found: list[str] = []
    wrong: list[Broken] = []
    for cloud, sources in (("aws", [*_aws(host)]), ("azure", [*_azure(host)]), ("gcp", [*_gcp(host)])):
        wrong += [Broken(f"{cloud}: {one.why}", one.fix) for one in sources if isinstance(one, Broken)]
        if names := [one for one in sources if isinstance(one, str)]:
            found.append(f"{cloud}: {', '.join(names)}")
    if wrong:
        yield Check("credentials", "wrong", "; ".join([*(one.why for one in wrong), *found]), "complete ones, if any",
                    "; ".join(one.fix for one in wrong))
        return
    sources_text = "; ".join(found) or "none found: local files need none"
    open_files = [path for path in (AWS_CREDENTIALS, GCLOUD_CREDENTIALS) if _is_open(host, path)]
    if open_files:
        yield Check("credentials", "warning", f"{sources_text}; others can read ~/{' and ~/'.join(open_files)}",
                    "readable by you only", f"chmod 600 ~/{' ~/'.join(open_files)}")
        return
    yield Check("credentials", "ok", sources_text)


def _aws(host: Host) -> Iterator[str | Broken]:
    env = host.env
    has_id, has_secret = bool(env.get("AWS_ACCESS_KEY_ID")), bool(env.get("AWS_SECRET_ACCESS_KEY"))
    if has_id and has_secret:
        yield "the environment's key" + (" with a session token" if env.get("AWS_SESSION_TOKEN") else "")
    elif has_id or has_secret:
        missing = "AWS_SECRET_ACCESS_KEY" if has_id else "AWS_ACCESS_KEY_ID"
        yield Broken(f"{missing} is not set, and the other half is", f"set {missing}, or unset both")
    yield from _file(host, "AWS_WEB_IDENTITY_TOKEN_FILE")
    if env.get("AWS_CONTAINER_CREDENTIALS_FULL_URI") or env.get("AWS_CONTAINER_CREDENTIALS_RELATIVE_URI"):
        yield "the container's role (Pod Identity or ECS)"
    if env.get("AWS_PROFILE"):
        yield f"profile {env['AWS_PROFILE']}"
    else:
        yield from [f"~/{path}" for path in (AWS_CREDENTIALS, AWS_CONFIG) if host.home(path).is_file()][:1]


def _azure(host: Host) -> Iterator[str | Broken]:
    env = host.env
    yield from (name for name in AZURE_KEYS if env.get(name))
    if env.get("AZURE_CLIENT_ID") and env.get("AZURE_CLIENT_SECRET"):
        yield "the environment's service principal"
    yield from _file(host, "AZURE_FEDERATED_TOKEN_FILE")
    if _has_subscription(host):
        yield "az login"


def _gcp(host: Host) -> Iterator[str | Broken]:
    yield from _file(host, "GOOGLE_APPLICATION_CREDENTIALS")
    if host.home(GCLOUD_CREDENTIALS).is_file():
        yield "gcloud auth application-default login"


def _has_subscription(host: Host) -> bool:
    """Return whether somebody is logged in: az writes this file on its first run, and lists subscriptions after a
    login."""
    try:
        profile = json.loads(host.home(".azure/azureProfile.json").read_text(encoding="utf-8-sig", errors="replace"))
    except (OSError, ValueError):
        return False
    return isinstance(profile, dict) and bool(profile.get("subscriptions"))


def _file(host: Host, variable: str) -> Iterator[str | Broken]:
    if path := host.env.get(variable):
        is_there = (host.path(path) if path.startswith("/") else host.home(path)).is_file()
        yield TOKEN_FILES[variable] if is_there else Broken(
            f"{variable} names a missing file", f"unset {variable}, or put the file where it says")


def _is_open(host: Host, name: str) -> bool:
    try:
        return bool(host.home(name).stat().st_mode & (stat.S_IRGRP | stat.S_IROTH))
    except OSError:
        return False
