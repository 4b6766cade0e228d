"""Which clouds this machine has credentials for, and where from. Only names of places are told, never a secret."""

from __future__ import annotations

import json
import stat
from collections.abc import Callable, Iterator

from embark.doctor.check import Check
from embark.doctor.here import Here

_NONE = "none found: files on this machine need none"


def credentials(here: Here) -> Iterator[Check]:
    found: list[str] = []
    wrong: list[tuple[str, str]] = []
    for cloud, look in _CLOUDS:
        sources = []
        for source, trouble, fix in look(here):
            if trouble:
                wrong.append((f"{cloud}: {trouble}", fix))
            else:
                sources.append(source)
        if sources:
            found.append(f"{cloud}: {', '.join(sources)}")
    told = "; ".join(found) or _NONE
    if wrong:
        yield Check("credentials", "wrong", "; ".join([what for what, _ in wrong] + found),
                    "whole, where there are any", "; ".join(fix for _, fix in wrong))
        return
    open_files = [path for path in (".aws/credentials", ".config/gcloud/application_default_credentials.json")
                  if _is_open(here, path)]
    if open_files:
        yield Check("credentials", "warning", f"{told}; others can read ~/{' and ~/'.join(open_files)}",
                    "for your eyes only", f"chmod 600 ~/{' ~/'.join(open_files)}")
        return
    yield Check("credentials", "ok", told)


Source = tuple[str, str, str]
"""Where from; or, where it is broken, what is wrong and the fix."""


def _aws(here: Here) -> Iterator[Source]:
    env = here.env
    has_id, has_secret = bool(env.get("AWS_ACCESS_KEY_ID")), bool(env.get("AWS_SECRET_ACCESS_KEY"))
    if has_id and has_secret:
        yield "the environment's key" + (" with a session token" if env.get("AWS_SESSION_TOKEN") else ""), "", ""
    elif has_id or has_secret:
        missing = "AWS_SECRET_ACCESS_KEY" if has_id else "AWS_ACCESS_KEY_ID"
        yield "", f"{missing} is not set, and the other half is", f"set {missing}, or unset both"
    if token := env.get("AWS_WEB_IDENTITY_TOKEN_FILE"):
        yield from _file(here, token, "a role for the service account (IRSA)", "AWS_WEB_IDENTITY_TOKEN_FILE")
    if env.get("AWS_CONTAINER_CREDENTIALS_FULL_URI") or env.get("AWS_CONTAINER_CREDENTIALS_RELATIVE_URI"):
        yield "the container's role (Pod Identity or ECS)", "", ""
    if env.get("AWS_PROFILE"):
        yield f"profile {env['AWS_PROFILE']}", "", ""
    elif here.home(".aws/credentials").is_file():
        yield "~/.aws/credentials", "", ""
    elif here.home(".aws/config").is_file():
        yield "~/.aws/config", "", ""


def _azure(here: Here) -> Iterator[Source]:
    env = here.env
    for name in ("AZURE_STORAGE_ACCOUNT_KEY", "AZURE_STORAGE_ACCESS_KEY", "AZURE_STORAGE_SAS_KEY",
                 "AZURE_STORAGE_CONNECTION_STRING"):
        if env.get(name):
            yield name, "", ""
    if env.get("AZURE_CLIENT_ID") and env.get("AZURE_CLIENT_SECRET"):
        yield "the environment's service principal", "", ""
    if token := env.get("AZURE_FEDERATED_TOKEN_FILE"):
        yield from _file(here, token, "workload identity", "AZURE_FEDERATED_TOKEN_FILE")
    if _has_subscription(here):
        yield "az login", "", ""


def _gcp(here: Here) -> Iterator[Source]:
    if key := here.env.get("GOOGLE_APPLICATION_CREDENTIALS"):
        yield from _file(here, key, "a key file", "GOOGLE_APPLICATION_CREDENTIALS")
    if here.home(".config/gcloud/application_default_credentials.json").is_file():
        yield "gcloud auth application-default login", "", ""


def _has_subscription(here: Here) -> bool:
    """az writes this file when it is first run; who has logged in has subscriptions in it. No secret is in it."""
    try:
        told = json.loads(here.home(".azure/azureProfile.json").read_text(encoding="utf-8-sig", errors="replace"))
    except (OSError, ValueError):
        return False
    return isinstance(told, dict) and bool(told.get("subscriptions"))


def _file(here: Here, path: str, source: str, name: str) -> Iterator[Source]:
    where = here.path(path) if path.startswith("/") else here.home(path)
    if where.is_file():
        yield source, "", ""
    else:
        yield "", f"{name} names a file that is not there", f"unset {name}, or put the file where it says"


def _is_open(here: Here, name: str) -> bool:
    try:
        return bool(here.home(name).stat().st_mode & (stat.S_IRGRP | stat.S_IROTH))
    except OSError:
        return False


_CLOUDS: tuple[tuple[str, Callable[[Here], Iterator[Source]]], ...] = (("aws", _aws), ("azure", _azure), ("gcp", _gcp))
