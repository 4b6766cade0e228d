"""Cloud Storage over HTTP: an emulator in this process, so that Embark itself uses the buckets of the account."""

import json
import socket
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path

from gcp_storage_emulator.server import create_server

from cloudsim.account import Account

HOST = "127.0.0.1"


def start(account: Account) -> None:
    """Start the emulator and set the variables that lead clients to it."""
    with socket.socket() as free:
        free.bind((HOST, 0))
        port = free.getsockname()[1]
    server = create_server(HOST, port, in_memory=False, data_dir=str(account.folder / "buckets"))
    server.start()
    account.on_close.append(server.stop)
    # Without it gcsfs asks by gRPC for the kind of a bucket, which an emulator does not answer for a minute.
    account.environment |= {"STORAGE_EMULATOR_HOST": f"http://{HOST}:{port}",
                            "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false"}


def folder(account: Account, bucket: str) -> Path:
    """Return the folder in which the emulator keeps a bucket's objects."""
    return account.folder / "buckets" / ".cloudstorage" / bucket


def create(account: Account, bucket: str) -> None:
    folder(account, bucket).mkdir(parents=True, exist_ok=True)
    _call(account, "POST", "/storage/v1/b?project=x", {"name": bucket})


def delete(account: Account, bucket: str) -> None:
    """Delete a bucket and its objects."""
    root = folder(account, bucket)
    for path in sorted(root.rglob("*")):
        if path.is_file():
            name = urllib.parse.quote(str(path.relative_to(root)), safe="")
            _call(account, "DELETE", f"/storage/v1/b/{bucket}/o/{name}")
    _call(account, "DELETE", f"/storage/v1/b/{bucket}")


def _call(account: Account, method: str, path: str, body: object = None) -> None:
    host = account.environment.get("STORAGE_EMULATOR_HOST")
    if not host:
        return
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(host + path, data=data, method=method,
                                     headers={"Content-Type": "application/json"})
    try:
        urllib.request.urlopen(request, timeout=30).close()
    except urllib.error.HTTPError as error:
        error.close()  # The emulator does not know objects that gcloud has copied.
