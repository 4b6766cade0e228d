"""Servers that stand in for the clouds' stores: real programs on free ports of this machine, ended when done."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import hmac
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from email.utils import formatdate
from pathlib import Path

from limits import HANG_S

CLOUD_NAMES = ("AWS_", "AZURE_", "AZURITE_", "GOOGLE_", "GCSFS_", "STORAGE_EMULATOR_HOST", "BOTO")
SECRET = "Wq7-do-not-show-me-Zx9"
AZURE_ACCOUNT = "devstoreaccount1"
# The account of every azurite, from its documentation.
AZURE_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
MOTO = """
import sys, threading
from moto.s3.responses import S3Response
from moto.server import main
put, get, lock = S3Response.put_object, S3Response.get_object, threading.Lock()
def put_one(self):  # S3 looks and writes in one, for If-None-Match; moto does in many threads
    generation = self.headers.get("X-Goog-If-Generation-Match")
    if generation:  # Google's condition: the number of what is replaced, or 0 where there must be nothing
        condition = {"If-Match": '"%032x"' % int(generation)} if int(generation) else {"If-None-Match": "*"}
        self.headers = {**dict(self.headers), **condition}
    with lock:
        return put(self)
def get_one(self):
    status, headers, body = get(self)
    tag = {name.lower(): value for name, value in headers.items()}.get("etag", "").strip('"')
    return status, {**headers, **({"x-goog-generation": str(int(tag, 16))} if len(tag) == 32 else {})}, body
S3Response.put_object, S3Response.get_object = put_one, get_one
main(sys.argv[1:])
"""


@dataclass(frozen=True)
class Emulator:
    """A store that is up, with one bucket made."""

    uri: str
    port: int
    env: dict[str, str]
    """What a user would set to reach it."""


def outside_of_clouds(home: Path) -> dict[str, str]:
    """This process's environment with nothing in it that leads to a cloud or its credentials."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(CLOUD_NAMES)}
    return {**env, "HOME": str(home), "NO_PROXY": "127.0.0.1,localhost", "no_proxy": "127.0.0.1,localhost",
            "AWS_EC2_METADATA_DISABLED": "true"}


@contextlib.contextmanager
def s3() -> Iterator[Emulator]:
    """moto's server."""
    with _server(lambda port: [sys.executable, "-c", MOTO, "-H", "127.0.0.1", "-p", str(port)]) as port:
        # By a plain request: s3fs asks for a location that moto refuses in us-east-1.
        _call("PUT", f"http://127.0.0.1:{port}/models")
        yield Emulator("s3://models", port, s3_env(port))


def s3_env(port: int) -> dict[str, str]:
    return {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}", "AWS_REGION": "us-east-1",
            "AWS_ACCESS_KEY_ID": "AKIAEMULATOR", "AWS_SECRET_ACCESS_KEY": SECRET}


def gs_xml(s3: Emulator) -> Emulator:
    """obstore speaks Google's XML interface, which is S3's but for names and credentials, so moto answers it too."""
    return Emulator("gs://models", s3.port, {"GOOGLE_BASE_URL": f"http://127.0.0.1:{s3.port}",
                                             "GOOGLE_BEARER_TOKEN": SECRET})


@contextlib.contextmanager
def gs() -> Iterator[Emulator]:
    """gcp-storage-emulator, which answers Google's JSON interface: reached by gcsfs."""
    script = "import sys; from gcp_storage_emulator.__main__ import main; sys.exit(main(sys.argv[1:]))"
    options = ["start", "--host=127.0.0.1", "--in-memory"]
    with _server(lambda port: [sys.executable, "-c", script, *options, f"--port={port}"]) as port:
        _call("POST", f"http://127.0.0.1:{port}/storage/v1/b?project=x", json.dumps({"name": "models"}).encode())
        # gcsfs otherwise asks an emulator by gRPC what kind of bucket it has, for a minute.
        env = {"STORAGE_EMULATOR_HOST": f"http://127.0.0.1:{port}", "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false"}
        yield Emulator("gs://models", port, env)


@contextlib.contextmanager
def az() -> Iterator[Emulator]:
    """azurite."""
    options = ["--silent", "--skipApiVersionCheck", "--disableTelemetry", "--inMemoryPersistence"]
    with _server(lambda port: ["azurite-blob", *options, "--blobHost", "127.0.0.1", "--blobPort", str(port)]) as port:
        _make_container(port, "models")
        env = {"AZURE_STORAGE_USE_EMULATOR": "true", "AZURITE_BLOB_STORAGE_URL": f"http://127.0.0.1:{port}"}
        yield Emulator("az://models", port, env)


@contextlib.contextmanager
def _server(command_for) -> Iterator[int]:
    with tempfile.TemporaryDirectory() as home, open(Path(home, "log"), "w+b") as log:
        for _ in range(3):
            port = _free_port()
            # Not ours, so not measured: what measures our lines makes a server of Python slower by a third.
            env = {name: value for name, value in outside_of_clouds(Path(home)).items() if not name.startswith("COV")}
            process = subprocess.Popen(command_for(port), cwd=home, env=env, stdin=subprocess.DEVNULL, stdout=log,
                                       stderr=subprocess.STDOUT)
            try:
                if _answers(port, process):
                    yield port
                    return
            finally:
                process.terminate()
                try:
                    process.wait(20)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()
        log.seek(0)
        raise RuntimeError(f"{command_for(0)[0]} did not start: {log.read().decode(errors='replace')[-2000:]}")


def _answers(port: int, process: subprocess.Popen) -> bool:
    until = time.monotonic() + HANG_S
    while time.monotonic() < until and process.poll() is None:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
            return True
        time.sleep(0.05)
    return False


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def _call(method: str, url: str, body: bytes = b"", headers: dict[str, str] | None = None) -> None:
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    request = urllib.request.Request(url, data=body, method=method, headers=headers or {})
    request.add_header("Content-Type", "application/json")
    with direct.open(request, timeout=HANG_S):
        pass


def _make_container(port: int, name: str) -> None:
    """azurite wants even this signed, and obstore makes no containers."""
    version, date = "2021-12-02", formatdate(usegmt=True)
    to_sign = (
        "PUT\n\n\n\n\napplication/json\n\n\n\n\n\n\n" + f"x-ms-date:{date}\nx-ms-version:{version}\n"
        + f"/{AZURE_ACCOUNT}/{AZURE_ACCOUNT}/{name}\nrestype:container"
    )
    digest = hmac.new(base64.b64decode(AZURE_KEY), to_sign.encode(), hashlib.sha256).digest()
    signature = base64.b64encode(digest).decode()
    _call("PUT", f"http://127.0.0.1:{port}/{AZURE_ACCOUNT}/{name}?restype=container", headers={
        "x-ms-date": date, "x-ms-version": version, "Authorization": f"SharedKey {AZURE_ACCOUNT}:{signature}",
    })
