"""A process that holds an account, and programs for the PATH that pass their arguments on to it."""

import importlib
import json
import marshal
import secrets
import signal
import socketserver
import sys
from dataclasses import asdict
from pathlib import Path

from cloudsim.account import Account, Call
from embark.rehearse.processes import free_port

SHIM = r"""#!/bin/bash
input=
for word; do
  case $word in
    - | *=- | --password-stdin) input=$(/bin/cat && echo .) && input=${{input%%.}}; break ;;
  esac
done
fields=({token} "${{0##*/}}" "$PWD" "$input" $# "$@")
mapfile -d '' -t -O ${{#fields[@]}} fields </proc/self/environ
exec 3<>/dev/tcp/127.0.0.1/{port} || exit
printf '%s\0' ${{#fields[@]}} "${{fields[@]}}" >&3
IFS= read -r -d '' code <&3
IFS= read -r -d '' err <&3
printf %s "$err" >&2
case "$code $*" in
  "0 port-forward"* | "0 run services proxy"*) exec "{python}" -m cloudsim.forward $(/bin/cat <&3) {forward} ;;
esac
/bin/cat <&3
exit "$code"
"""
"""Starts for each command, and is not written in Python because that takes ten times as long to start. It sends fields
that end with a zero byte, their number first; the answer is the exit code and stderr, each with a zero byte, and
stdout; or, for a forwarded port, the arguments of the program that passes connections on."""
REPORT = "@report"  # A request for the report, in place of the name of a program.


class AccountServer(socketserver.TCPServer):
    """Answers commands one after the other if they know its token."""

    def __init__(self, account: Account) -> None:
        self.account = account
        self.token = secrets.token_hex(16)
        super().__init__(("127.0.0.1", 0), _Handler)

    def write_shims(self, folder: Path) -> None:
        """Write a program of each name into a folder that a shell has first on its PATH, and beside it curl's file that
        leads to forwarded ports."""
        folder.mkdir(parents=True, exist_ok=True)
        forward = free_port()
        (folder.parent / ".curlrc").write_text(f'connect-to = "localhost::127.0.0.1:{forward}"\n')
        text = SHIM.format(token=self.token, port=self.server_address[1], python=sys.executable, forward=forward)
        for name in self.account.programs:
            path = folder / name
            path.write_text(text)
            path.chmod(0o700)


class _Handler(socketserver.StreamRequestHandler):
    def handle(self) -> None:
        token, program, folder, stdin, count, *rest = self._fields()
        server = self.server
        assert isinstance(server, AccountServer)
        if token != server.token:
            return
        if program == REPORT:
            self.wfile.write(marshal.dumps(asdict(server.account.report())))
            return
        words, env = rest[:int(count)], dict(one.split("=", 1) for one in rest[int(count):])
        done = server.account.run(Call(program, tuple(words), Path(folder), env, stdin))
        self.wfile.write(f"{done.code}\0{done.err}\0{done.out}".encode())

    def _fields(self) -> list[str]:
        data = b""
        while (end := data.find(b"\0")) < 0 or data.count(b"\0") <= int(data[:end]):
            more = self.rfile.read1()
            if not more:
                return [""] * 5
            data += more
        return data.decode(errors="surrogateescape").split("\0")[1:-1]


def open_account(cloud: str, folder: Path) -> Account:
    """Open an empty account of a cloud, logged in."""
    opened = importlib.import_module(f"cloudsim.{cloud}").open_account(folder)
    assert isinstance(opened, Account)
    return opened


def main(cloud: str, folder: str) -> None:
    """Serve until SIGTERM, after writing `programs/`, `server.json` and `environment.json` into `folder`."""
    root = Path(folder)
    account = open_account(cloud, root)
    (root / "environment.json").write_text(json.dumps(account.environment))

    def stop(number: int, frame: object) -> None:
        raise SystemExit(0)

    signal.signal(signal.SIGTERM, stop)
    try:
        with AccountServer(account) as server:
            server.write_shims(root / "programs")
            (root / "server.json").write_text(json.dumps([server.server_address[1], server.token]))
            (root / "ready").touch()
            server.serve_forever(poll_interval=0.05)
    finally:
        account.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
