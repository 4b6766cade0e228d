"""A process that holds an account, and programs on the PATH that pass their arguments on to it over a Unix socket."""

import importlib
import json
import marshal
import signal
import socketserver
import stat
import sys
from dataclasses import asdict
from pathlib import Path

from embark.rehearse.account.account import Account, Call

SHIM = """#!{python} -SEB
import _socket, marshal, os, sys
words = sys.argv[1:]
reads = any(word == "-" or word.endswith("=-") or word == "--password-stdin" for word in words)
call = dict(program=os.path.basename(sys.argv[0]), words=words, folder=os.getcwd(), env=dict(os.environ),
            stdin=sys.stdin.buffer.read() if reads else b"")
link = _socket.socket(_socket.AF_UNIX)
link.connect({socket!r})
link.sendall(marshal.dumps(call))
link.shutdown(_socket.SHUT_WR)
code, out, err = marshal.loads(b"".join(iter(lambda: link.recv(65536), b"")))
sys.stderr.write(err)
sys.stdout.write(out)
sys.exit(code)
"""
"""Started for each command, so it imports only what is built in: `socket` and `json` would take twice as long again."""
REPORT = "@report"  # Instead of a program: what the account has seen.


def write_shims(account: Account, folder: Path, socket_path: Path) -> None:
    """One program of each name in a folder for the front of PATH."""
    folder.mkdir(parents=True, exist_ok=True)
    text = SHIM.format(python=sys.executable, socket=str(socket_path))
    for name in account.programs:
        path = folder / name
        path.write_text(text)
        path.chmod(path.stat().st_mode | stat.S_IXUSR | stat.S_IXGRP | stat.S_IXOTH)


class AccountServer(socketserver.UnixStreamServer):
    """Answers one command after the other."""

    def __init__(self, account: Account, socket_path: Path) -> None:
        self.account = account
        super().__init__(str(socket_path), _Handler)


class _Handler(socketserver.StreamRequestHandler):
    def handle(self) -> None:
        data = self.rfile.read()
        if not data:
            return
        raw = marshal.loads(data)
        server = self.server
        assert isinstance(server, AccountServer)
        if raw["program"] == REPORT:
            self.wfile.write(marshal.dumps(asdict(server.account.report())))
            return
        done = server.account.run(Call(raw["program"], tuple(raw["words"]), Path(raw["folder"]), raw["env"],
                                       raw["stdin"].decode()))
        self.wfile.write(marshal.dumps((done.code, done.out, done.err)))


def open_account(cloud: str, folder: Path) -> Account:
    """An empty account of a cloud, logged in to."""
    opened = importlib.import_module(f"embark.rehearse.account.{cloud}").open_account(folder)
    assert isinstance(opened, Account)
    return opened


def main(cloud: str, folder: str) -> None:
    """Serve until SIGTERM. FOLDER gets `socket`, `programs/` and `environment.json`."""
    root = Path(folder)
    account = open_account(cloud, root)
    write_shims(account, root / "programs", root / "socket")
    (root / "environment.json").write_text(json.dumps(account.environment))

    def stop(number: int, frame: object) -> None:
        raise SystemExit(0)

    signal.signal(signal.SIGTERM, stop)
    try:
        with AccountServer(account, root / "socket") as server:
            (root / "ready").touch()
            server.serve_forever(poll_interval=0.05)
    finally:
        account.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
