"""Finds the clouds that this machine has credentials for, and their sources, by name only: never a secret."""

import json
import stat
from collections.abc import Callable, Iterator

from embark.doctor.host import Check, Host


def check_credentials(host: Host) -> Iterator[Check]:
    found: list[str] = []
    wrong: list[tuple[str, str]] = []
    for cloud, look in _CLOUDS:
        sources = []
        for source, trouble, fix in look(host):
            if trouble:
                wrong.append((f"{cloud}: {trouble}", fix))
            else:
                sources.append(source)
        if sources:
            found.append(f"{cloud}: {', '.join(sources)}")
    sources_text = "; ".join(found) or "none found: local files need none"
    if wrong:
        yield Check("credentials", "wrong", "; ".join([what for what, _ in wrong] + found),
                    "complete ones, if any", "; ".join(fix for _, fix in wrong))
        return
    open_files = [path for path in (".aws/credentials", ".config/gcloud/application_default_credentials.json")
                  if _is_open(host, path)]
    if open_files:
        yield Check("credentials", "warning", f"{sources_text}; others can read ~/{' and ~/'.join(open_files)}",
                    "readable by you only", f"chmod 600 ~/{' ~/'.join(open_files)}")
        return
    yield Check("credentials", "ok", sources_text)


Source = tuple[str, str, str]  # The source; or, if it is broken, what is wrong and the fix.


def _aws(host: Host) -> Iterator[Source]:
    env = host.env
    has_id, has_secret = bool(env.get("AWS_ACCESS_KEY_ID")), bool(env.get("AWS_SECRET_ACCESS_KEY"))
    if has_id and has_secret:
        yield "the environment's key" + (" with a session token" if env.get("AWS_SESSION_TOKEN") else ""), "", ""
    elif has_id or has_secret:
        missing = "AWS_SECRET_ACCESS_KEY" if has_id else "AWS_ACCESS_KEY_ID"
        yield "", f"{missing} is not set, and the other half is", f"set {missing}, or unset both"
    if token := env.get("AWS_WEB_IDENTITY_TOKEN_FILE"):
        yield from _file(host, token, "a role for the service account (IRSA)", "AWS_WEB_IDENTITY_TOKEN_FILE")
    if env.get("AWS_CONTAINER_CREDENTIALS_FULL_URI") or env.get("AWS_CONTAINER_CREDENTIALS_RELATIVE_URI"):
        yield "the container's role (Pod Identity or ECS)", "", ""
    if env.get("AWS_PROFILE"):
        yield f"profile {env['AWS_PROFILE']}", "", ""
    elif host.home(".aws/credentials").is_file():
        yield "~/.aws/credentials", "", ""
    elif host.home(".aws/config").is_file():
        yield "~/.aws/config", "", ""


def _azure(host: Host) -> Iterator[Source]:
    env = host.env
    for name in ("AZURE_STORAGE_ACCOUNT_KEY", "AZURE_STORAGE_ACCESS_KEY", "AZURE_STORAGE_SAS_KEY",
                 "AZURE_STORAGE_CONNECTION_STRING"):
        if env.get(name):
            yield name, "", ""
    if env.get("AZURE_CLIENT_ID") and env.get("AZURE_CLIENT_SECRET"):
        yield "the environment's service principal", "", ""
    if token := env.get("AZURE_FEDERATED_TOKEN_FILE"):
        yield from _file(host, token, "workload identity", "AZURE_FEDERATED_TOKEN_FILE")
    if _has_subscription(host):
        yield "az login", "", ""


def _gcp(host: Host) -> Iterator[Source]:
    if key := host.env.get("GOOGLE_APPLICATION_CREDENTIALS"):
        yield from _file(host, key, "a key file", "GOOGLE_APPLICATION_CREDENTIALS")
    if host.home(".config/gcloud/application_default_credentials.json").is_file():
        yield "gcloud auth application-default login", "", ""


def _has_subscription(host: Host) -> bool:
    """Whether somebody is logged in: az writes this file on its first run, and lists subscriptions after a login."""
    try:
        profile = json.loads(host.home(".azure/azureProfile.json").read_text(encoding="utf-8-sig", errors="replace"))
    except (OSError, ValueError):
        return False
    return isinstance(profile, dict) and bool(profile.get("subscriptions"))


def _file(host: Host, path: str, source: str, name: str) -> Iterator[Source]:
    where = host.path(path) if path.startswith("/") else host.home(path)
    if where.is_file():
        yield source, "", ""
    else:
        yield "", f"{name} names a missing file", f"unset {name}, or put the file where it says"


def _is_open(host: Host, name: str) -> bool:
    try:
        return bool(host.home(name).stat().st_mode & (stat.S_IRGRP | stat.S_IROTH))
    except OSError:
        return False


_CLOUDS: tuple[tuple[str, Callable[[Host], Iterator[Source]]], ...] = (("aws", _aws), ("azure", _azure), ("gcp", _gcp))
