"""Blob Storage over HTTP as far as a store needs it: put, get, head, list and delete, checked against the user's
roles."""

import re
import threading
import xml.sax.saxutils
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from cloudsim.azure.arm import Subscription
from cloudsim.azure.cluster_cloud import blob_error

STATUS = {"404": 404, "403": 403}
BOUNDARY = "batchresponse_embark"
VERSION = "2023-11-03"
_DELETE = re.compile(r"^DELETE (\S+) HTTP", re.MULTILINE)


def serve_blobs(azure: Subscription) -> str:
    """Start the server and return its address; it ends with the account."""

    class Handler(_Handler):
        subscription = azure

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    azure.account.on_close += [server.server_close, server.shutdown]  # The account calls the last one first.
    return f"http://127.0.0.1:{server.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    """Answers requests to `/ACCOUNT/CONTAINER/BLOB`, which is Azurite's form of an address."""

    subscription: Subscription
    protocol_version = "HTTP/1.1"

    def do_PUT(self) -> None:
        data = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        found = self._path(write=True)
        if found is None:
            return
        path, query = found
        path.parent.mkdir(parents=True, exist_ok=True)
        if query.get("comp") == ["block"]:
            path.with_name(f"{path.name}.{query['blockid'][0].replace('/', '_')}.part").write_bytes(data)
        elif query.get("comp") == ["blocklist"]:
            names = [one.partition("<")[0] for one in data.decode().split(">")
                     if one.partition("<")[0].strip() and one.partition("<")[2].startswith("/")]
            parts = [path.with_name(f"{path.name}.{name.replace('/', '_')}.part") for name in names]
            path.write_bytes(b"".join(part.read_bytes() for part in parts))
            for part in parts:
                part.unlink()
        else:
            path.write_bytes(data)
        self._answer(201, headers=_facts(path) if path.exists() else {})

    def do_GET(self) -> None:
        found = self._path(write=False)
        if found is None:
            return
        path, query = found
        if query.get("comp") == ["list"]:
            self._answer(200, self._listing(path, query), {"Content-Type": "application/xml"})
        elif not path.is_file():
            self._answer(404, headers={"x-ms-error-code": "BlobNotFound"})
        else:
            data, total = path.read_bytes(), path.stat().st_size
            span = self.headers.get("x-ms-range") or self.headers.get("Range") or ""
            if span.startswith("bytes="):
                first, _, last = span[6:].partition("-")
                start, end = int(first), min(int(last or total - 1), total - 1)
                where = {"Content-Range": f"bytes {start}-{end}/{total}"}
                self._answer(206, data[start:end + 1], {**_facts(path), **where})
            else:
                self._answer(200, data, _facts(path))

    def do_HEAD(self) -> None:
        found = self._path(write=False)
        if found is None:
            return
        path = found[0]
        if path.is_file():
            self._answer(200, headers={**_facts(path), "Content-Length": str(path.stat().st_size)})
        else:
            self._answer(404, headers={"x-ms-error-code": "BlobNotFound"})

    def do_DELETE(self) -> None:
        found = self._path(write=True)
        if found is None:
            return
        is_there = found[0].is_file()
        found[0].unlink(missing_ok=True)
        self._answer(202 if is_there else 404)

    def do_POST(self) -> None:
        """Answer a batch of deletions, each in a part of its own."""
        text = self.rfile.read(int(self.headers.get("Content-Length") or 0)).decode()
        parts = []
        for number, target in enumerate(_DELETE.findall(text)):
            found = self._path(write=True, target=target)
            if found is None:
                return
            status = "202 Accepted" if found[0].is_file() else "404 Not Found"
            found[0].unlink(missing_ok=True)
            parts.append(f"--{BOUNDARY}\r\nContent-Type: application/http\r\nContent-ID: {number}\r\n\r\n"
                         f"HTTP/1.1 {status}\r\nx-ms-version: {VERSION}\r\n\r\n")
        body = "".join([*parts, f"--{BOUNDARY}--\r\n"]).encode()
        self._answer(202, body, {"Content-Type": f"multipart/mixed; boundary={BOUNDARY}"})

    def _path(self, *, write: bool, target: str = "") -> tuple[Path, dict[str, list[str]]] | None:
        """Return the file of a blob if its container exists and the user has a role on it; otherwise answer with the
        error."""
        url = urlsplit(target or self.path)
        account, container, *rest = unquote(url.path).strip("/").split("/")
        azure = self.subscription
        error = blob_error(azure, account, container, azure.user, write=write)
        if error:
            self._answer(STATUS.get(error[:3], 404), error.encode())
            return None
        return azure.account.folder.joinpath("blobs", account, container, *rest), parse_qs(url.query)

    def _listing(self, folder: Path, query: dict[str, list[str]]) -> bytes:
        prefix = query.get("prefix", [""])[0]
        rows = []
        for path in sorted(one for one in folder.rglob("*") if one.is_file() and one.suffix != ".part"):
            name = path.relative_to(folder).as_posix()
            if name.startswith(prefix):
                facts = _facts(path)
                rows.append(f"<Blob><Name>{xml.sax.saxutils.escape(name)}</Name><Properties><Last-Modified>"
                            f"{facts['Last-Modified']}</Last-Modified><Etag>{facts['ETag']}</Etag><Content-Length>"
                            f"{path.stat().st_size}</Content-Length><Content-Type>application/octet-stream"
                            "</Content-Type><BlobType>BlockBlob</BlobType></Properties></Blob>")
        return ('<?xml version="1.0" encoding="utf-8"?><EnumerationResults><Blobs>' + "".join(rows) +
                "</Blobs><NextMarker /></EnumerationResults>").encode()

    def _answer(self, status: int, body: bytes = b"", headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        given = {"Content-Length": str(len(body)), "x-ms-version": VERSION, **(headers or {})}
        for name, value in given.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing, because the account records commands."""


def _facts(path: Path) -> dict[str, str]:
    stat = path.stat()
    return {"ETag": f'"{stat.st_mtime_ns:x}-{stat.st_size:x}"',
            "Last-Modified": formatdate(stat.st_mtime, usegmt=True)}
