"""S3, Google Cloud Storage and Azure Blob Storage as object stores, through obstore."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast
from urllib.request import Request, urlopen

import obstore
from obstore.exceptions import AlreadyExistsError, BaseError, PreconditionError
from obstore.store import AzureStore, GCSStore, S3Store

from embark.errors import Fault, MissingPackage, UserError
from embark.values import JsonDict
from .errors import (
    DAMAGED,
    NotFound,
    RetriesExhausted,
    RetryPolicy,
    call_with_retries,
    explain,
    is_unanswered,
    is_upload_gone,
)
from .object_store import (
    MIB,
    PIECE_BYTES,
    Data,
    Entries,
    Entry,
    ObjectStore,
    normalize_path,
    translate_errors,
)

if TYPE_CHECKING:
    from obstore import UpdateVersion
    from obstore.store import ClientConfig
    from obstore.store import ObjectStore as Client

MAX_PARTS = 9_000  # S3 takes 10,000 parts of an upload.
NUM_PARTS_AT_ONCE = 4  # Parts of one file; `upload_many` sends several files at a time besides.
NEEDED = {
    "s3": "the bucket's name, AWS_REGION and AWS_ENDPOINT_URL",
    "gs": "the bucket's name, GOOGLE_APPLICATION_CREDENTIALS and GOOGLE_BASE_URL",
    "az": "the container's name, AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ENDPOINT"
}
ENDPOINTS = {
    "s3": ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"),
    "gs": ("GOOGLE_BASE_URL",),
    "az": ("AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT", "AZURITE_BLOB_STORAGE_URL")
}


class CloudStore(ObjectStore):
    """Objects below a prefix of a bucket. obstore retries, signs, and never shows an object before it is complete."""

    library_errors = (OSError, BaseError, RetriesExhausted)

    def __init__(self, uri: str, store: Client, retry: RetryPolicy) -> None:
        super().__init__(uri)
        self._store = store
        self._retry = retry

    @translate_errors("read")
    def read(self, path: str) -> bytes:
        result = obstore.get(self._store, normalize_path(path))
        data = bytes(result.bytes())
        if len(data) != result.meta["size"]:
            raise self._short(path, result.meta["size"] - len(data))
        return data

    @translate_errors("read")
    def read_into(self, path: str, start: int, into: memoryview) -> None:
        if not len(into):
            return
        data = memoryview(obstore.get_range(self._store, normalize_path(path), start=start, length=len(into)))
        if len(data) != len(into):
            raise self._short(path, len(into) - len(data))
        into[:] = data

    @translate_errors("write")
    def write(self, path: str, data: Data, size_bytes: int | None = None) -> None:
        if isinstance(data, Path):
            size_bytes = data.stat().st_size
        elif isinstance(data, bytes | bytearray | memoryview):
            size_bytes = len(data)
        elif size_bytes is not None and size_bytes <= PIECE_BYTES:
            data = b"".join(data)
        part_bytes = 64 * MIB if size_bytes is None else max(PIECE_BYTES, -(-size_bytes // MAX_PARTS))
        before = None if size_bytes is not None and size_bytes <= part_bytes else self._version(path)
        try:
            obstore.put(
                self._store, normalize_path(path), data, chunk_size=part_bytes, max_concurrency=NUM_PARTS_AT_ONCE
            )
        except FileNotFoundError as error:
            # Where the answer to the last request was lost, it is sent again, and then the upload is no more: it is
            # the file. So another file than before, of the right size, is the one that was sent.
            after = self._version(path) if is_upload_gone(error) else None
            if after in (None, before) or (size_bytes is not None and after[1] != size_bytes):
                raise

    @translate_errors("write")
    def create(self, path: str, data: bytes) -> bool:
        try:
            obstore.put(self._store, normalize_path(path), data, mode="create")
        except AlreadyExistsError:
            return self._holds(path, data)
        return True

    @translate_errors("write")
    def replace(self, path: str, data: bytes, expected: bytes) -> bool:
        try:
            found = obstore.get(self._store, normalize_path(path))
            if bytes(found.bytes()) != expected:
                return False
            seen = {key: found.meta.get(key) for key in ("e_tag", "version") if found.meta.get(key)}  # Google's: both
            obstore.put(self._store, normalize_path(path), data, mode=cast("UpdateVersion", seen))
        except FileNotFoundError:
            return False
        except PreconditionError:
            return self._holds(path, data)
        return True

    def _holds(self, path: str, data: bytes) -> bool:
        """Tell whether a conditional write that was refused is done nevertheless: where the answer to a request was
        lost, it is sent again, and then finds the file that it made."""
        with suppress(NotFound):
            return self.read(path) == data
        return False

    @translate_errors("list")
    def list(self, prefix: str = "") -> Entries:
        batches = obstore.list(self._store, normalize_path(prefix, may_be_empty=True) or None)
        found = [Entry(item["path"], item["size"], item["last_modified"].timestamp())
                 for batch in batches for item in batch]
        return sorted(found, key=lambda entry: entry.path)

    @translate_errors("look at")
    def size(self, path: str) -> int:
        return obstore.head(self._store, normalize_path(path))["size"]

    def delete(self, path: str) -> None:
        with suppress(NotFound):
            self._delete(path, [normalize_path(path)])

    def delete_prefix(self, prefix: str) -> None:
        # Again, because another rank or a lifecycle rule may take one of them first, which Azure reports as an error.
        for _ in range(3):
            paths = [entry.path for entry in self.list(normalize_path(prefix))]
            if not paths:
                return
            with suppress(NotFound):
                self._delete(prefix, paths)

    @translate_errors("delete")
    def _delete(self, asked: str, paths: Sequence[str]) -> None:
        # A delete of many is a POST, which obstore does not send again; but to delete twice does no harm.
        call_with_retries(lambda: obstore.delete(self._store, paths), self._retry, is_unanswered)

    def _version(self, path: str) -> tuple[str, int] | None:
        """Return what tells a file from another under the same name; None if there is no file."""
        with suppress(FileNotFoundError):
            found = obstore.head(self._store, normalize_path(path))
            return str(found["e_tag"]), found["size"]
        return None

    def _short(self, path: str, num_bytes: int) -> Fault:
        return Fault(f"{self.where(path)} ended {num_bytes} bytes early", DAMAGED)


def open_cloud_store(uri: str, retry: RetryPolicy) -> CloudStore:
    """Open `s3://`, `gs://` or `az://` with the credentials and endpoints of the environment."""
    scheme, _, rest = uri.partition("://")
    bucket, _, prefix = rest.partition("/")
    if not bucket:
        raise UserError(f"{uri!r} names no bucket", f"{scheme}://bucket/prefix")
    common: JsonDict = {
        "prefix": normalize_path(prefix, may_be_empty=True) or None,
        "client_options": _client(scheme, retry),
        "retry_config": {
            "max_retries": retry.max_retries,
            "retry_timeout": timedelta(seconds=retry.give_up_s),
            "backoff": {
                "init_backoff": timedelta(seconds=retry.first_wait_s),
                "max_backoff": timedelta(seconds=retry.longest_wait_s),
                "base": 2
            }
        }
    }
    store: Client
    try:
        if scheme == "s3":
            store = S3Store(bucket, credential_provider=_profile(), **common)
        elif scheme == "gs":
            store = GCSStore(bucket, **common)
        else:
            store = AzureStore(bucket, credential_provider=_azureml_token(), **common)
    except (BaseError, ValueError) as error:
        trouble = explain(error, "open", uri)
    else:
        return CloudStore(uri.rstrip("/"), store, retry)
    raise UserError(trouble.what, f"correct {NEEDED[scheme]}")


def _client(scheme: str, retry: RetryPolicy) -> ClientConfig:
    endpoint = next((os.environ[name] for name in ENDPOINTS[scheme] if os.getenv(name)), "")
    is_emulator = scheme == "az" and os.getenv("AZURE_STORAGE_USE_EMULATOR", "").lower() in ("1", "true")
    return {
        "allow_http": endpoint.startswith("http://") or is_emulator,
        "connect_timeout": timedelta(seconds=retry.connect_s),
        "read_timeout": timedelta(seconds=retry.silence_s),
        "timeout": timedelta(seconds=retry.request_s)
    }


def _azureml_token() -> Any:
    """Return a provider of tokens for an Azure ML endpoint's own identity, whose address and header obstore does not
    know; None elsewhere."""
    endpoint, secret = os.getenv("MSI_ENDPOINT"), os.getenv("MSI_SECRET")
    if not endpoint or not secret or os.getenv("IDENTITY_ENDPOINT"):
        return None

    def token() -> JsonDict:
        request = Request(f"{endpoint}?api-version=2017-09-01&resource=https://storage.azure.com/",
                          headers={"secret": secret, "Metadata": "true"})
        with urlopen(request, timeout=30) as response:
            found = json.load(response)
        return {"token": found["access_token"],
                "expires_at": datetime.fromtimestamp(float(found["expires_on"]), UTC)}

    return token


def _profile() -> Any:
    """Return a provider of AWS profiles and SSO by boto3. obstore itself knows keys in the environment, web identity,
    ECS, EKS and EC2."""
    own = ("AWS_ACCESS_KEY_ID", "AWS_WEB_IDENTITY_TOKEN_FILE", "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
           "AWS_CONTAINER_CREDENTIALS_FULL_URI", "AWS_SKIP_SIGNATURE")
    files = (os.getenv("AWS_SHARED_CREDENTIALS_FILE", "~/.aws/credentials"),
             os.getenv("AWS_CONFIG_FILE", "~/.aws/config"))
    profile = os.getenv("AWS_PROFILE")
    if any(os.getenv(name) for name in own):
        return None
    if not profile and not any(Path(name).expanduser().is_file() for name in files):
        return None
    try:
        from botocore.exceptions import BotoCoreError
        from obstore.auth.boto3 import Boto3CredentialProvider
    except ImportError:
        raise MissingPackage("AWS profiles need boto3, which is not installed",
                             "pip install 'embark-rec[cloud]', or set AWS_ACCESS_KEY_ID") from None
    try:
        return Boto3CredentialProvider()
    except BotoCoreError as error:
        raise UserError(f"AWS credentials: {error}", "correct AWS_PROFILE or the profile's own settings") from None
    except ValueError:
        return None
