"""`docker`: it records builds; a push needs a login and an existing repository."""

import hashlib
import json
import re
from pathlib import Path

from cloudsim.account import Account, AnsweredBy, Call
from cloudsim.grammar import ParsedCommand, load_grammar
from cloudsim.state import Refusal

_COPY = re.compile(r"^(?:COPY|ADD)\s+(?:--\S+\s+)*(.+)$", re.MULTILINE)


class Docker:
    name = "docker"
    answered_by: AnsweredBy = "stand-in"

    def __init__(self, account: Account) -> None:
        self._account = account
        self._grammar = load_grammar("docker")

    def run(self, call: Call) -> str:
        command = self._grammar.parse(call.words)
        handlers = {"build": self._build, "buildx build": self._build, "push": self._push, "login": self._login,
                    "tag": self._tag, "image inspect": self._inspect, "inspect": self._inspect,
                    "version": lambda *_: "Docker version 29.0.1\n", "info": lambda *_: "Server Version: 29.0.1\n"}
        return handlers[command.name](command, call)

    def _build(self, command: ParsedCommand, call: Call) -> str:
        folder = call.folder / str(command.positionals["PATH"])
        dockerfile = call.folder / command["--file"] if command["--file"] else folder / "Dockerfile"
        if not dockerfile.is_file():
            raise Refusal(f"ERROR: failed to build: failed to solve: failed to read dockerfile: open "
                          f"{dockerfile.name}: no such file or directory")
        text = dockerfile.read_text(encoding="utf-8")
        for line in _COPY.findall(text):
            self._check_copy(folder, line)
        wheels = sorted((folder / "dist").glob("embark_rec-*.whl")) if (folder / "dist").is_dir() else []
        if "embark_rec-" in text and not wheels:
            raise Refusal("ERROR: Could not install packages due to an OSError: [Errno 2] No such file or directory: "
                          "'/tmp/dist/embark_rec-*.whl'")
        for name in command["--tag"] or []:
            self._account.images.local.add(_tagged(name))
        return ""

    def _check_copy(self, folder: Path, line: str) -> None:
        words = json.loads(line) if line.startswith("[") else line.split()
        for source in words[:-1]:
            if "$" not in source and not list(folder.glob(source.rstrip("/"))):
                raise Refusal(f'ERROR: failed to build: failed to compute cache key: "/{source}": not found')

    def _push(self, command: ParsedCommand, call: Call) -> str:
        image = _tagged(str(command.positionals["NAME"]))
        if image not in self._account.images.local:
            raise Refusal(f"An image does not exist locally with the tag: {image.rpartition(':')[0]}")
        if self._account.registry is None:
            raise Refusal(f"push access denied, repository {image} does not exist or may require authorization")
        error = self._account.registry.push_error(image, self._account.images.logins)
        if error:
            raise Refusal(error)
        digest = f"sha256:{hashlib.sha256(image.encode()).hexdigest()}"
        self._account.images.pushed[image] = digest
        return f"{image.rpartition(':')[2]}: digest: {digest} size: 4321\n"

    def _login(self, command: ParsedCommand, call: Call) -> str:
        host = str(command.positionals.get("SERVER") or "docker.io").removeprefix("https://").partition("/")[0]
        password = call.stdin.strip() if command["--password-stdin"] else command.text("--password")
        if not password:
            raise Refusal("Error: Cannot perform an interactive login from a non TTY device")
        if self._account.registry is None:
            raise Refusal(f"Error response from daemon: Get \"https://{host}/v2/\": no such host")
        error = self._account.registry.login_error(host, command.text("--username"), password)
        if error:
            raise Refusal(error)
        self._account.images.logins.add(host)
        return "Login Succeeded\n"

    def _tag(self, command: ParsedCommand, call: Call) -> str:
        source, target = (_tagged(str(command.positionals[name])) for name in ("SOURCE", "TARGET"))
        if source not in self._account.images.local:
            raise Refusal(f"Error response from daemon: No such image: {source}")
        self._account.images.local.add(target)
        return ""

    def _inspect(self, command: ParsedCommand, call: Call) -> str:
        found = []
        for name in command.positionals["NAMES"]:
            image = _tagged(name)
            if image not in self._account.images.local:
                raise Refusal(f"Error response from daemon: No such image: {image}")
            digest = self._account.images.pushed.get(image)
            found.append({"RepoTags": [image],
                          "RepoDigests": [f"{image.rpartition(':')[0]}@{digest}"] if digest else []})
        template = command.text("--format")
        if template:
            return "".join(f"{_format(template, one)}\n" for one in found)
        return json.dumps(found) + "\n"


def _tagged(name: str) -> str:
    return name if ":" in name.rpartition("/")[2] or "@" in name else f"{name}:latest"


def _format(template: str, image: dict[str, list[str]]) -> str:
    """Fill in `{{index .RepoDigests 0}}`, `{{.RepoDigests}}` or `{{json .RepoDigests}}`."""
    digests = image["RepoDigests"]
    if "index" in template:
        if not digests:
            raise Refusal("template parsing error: error calling index: reflect: slice index out of range")
        return digests[0]
    return json.dumps(digests) if "json" in template else f"[{' '.join(digests)}]"
