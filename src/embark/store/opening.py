"""The object store that a uri names.

    runs/big, file:///data/big    a folder of this machine
    s3://bucket/prefix            Amazon S3 and what speaks like it (AWS_ENDPOINT_URL)
    gs://bucket/prefix            Google Cloud Storage
    az://container/prefix         Azure Blob Storage; the account is AZURE_STORAGE_ACCOUNT_NAME
    anything else                 by fsspec, where the package for its scheme is installed

Credentials come from where each cloud's own tools look for them, and never from a uri.
"""

import os
from pathlib import Path
from urllib.parse import unquote, urlsplit

from embark.errors import MissingPackage, UserError
from embark.store.local_store import LocalStore
from embark.store.object_store import ObjectStore
from embark.store.retry_policy import RetryPolicy


def open_store(uri: str | Path, retry: RetryPolicy | None = None) -> ObjectStore:
    """The object store at `uri`. Nothing is contacted before the first call; `ObjectStore.check` does it at once."""
    text = str(uri)
    scheme = text.partition("://")[0] if "://" in text else ""
    retry = retry or RetryPolicy()
    if scheme in ("", "file"):
        return LocalStore(_folder_of(text) if scheme else Path(text))
    _refuse_secrets(text)
    # The emulator of Google's store answers its JSON interface only, which gcsfs speaks and obstore does not.
    is_cloud = scheme in ("s3", "az") or (scheme == "gs" and "STORAGE_EMULATOR_HOST" not in os.environ)
    try:  # imported here, because their libraries are optional
        if is_cloud:
            from embark.store.cloud_store import open_cloud_store

            return open_cloud_store(text, retry)
        from embark.store.fsspec_store import open_fsspec_store

        return open_fsspec_store(text, retry)
    except ModuleNotFoundError as error:
        extra = "cloud" if is_cloud else "other-stores"
        raise MissingPackage(f"{scheme}:// needs {error.name}, which is not installed",
                             fix=f"pip install 'embark-rec[{extra}]'") from None


def _folder_of(uri: str) -> Path:
    parts = urlsplit(uri)
    if parts.netloc not in ("", "localhost"):
        raise UserError(f"{uri} names a file on another machine", fix=f"for a folder of this one: file:///{parts.netloc}…")
    return Path(unquote(parts.path))


def _refuse_secrets(uri: str) -> None:
    """A uri is written into specs, logs and messages, so nothing secret may stand in it."""
    scheme, _, rest = uri.partition("://")
    user, at, _ = rest.partition("/")[0].rpartition("@")
    in_cloud = scheme in ("s3", "gs", "az")
    if (at and (in_cloud or ":" in user)) or "sig=" in rest or (in_cloud and "?" in rest):
        raise UserError(f"the {scheme}:// uri holds credentials or options; it may hold only a bucket and a prefix",
                        fix="put credentials where the cloud's own tools look for them: environment, profile, role")
