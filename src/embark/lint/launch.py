"""How a container starts its training: the launcher, its options, and the script."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from embark.lint.shell import Command, Word, make_command, read_shell
from embark.lint.source import Place, Source
from embark.lint.yaml_nodes import Node

SHELLS = frozenset({"sh", "bash", "dash", "zsh", "ash"})
_SWITCHES = frozenset({"standalone", "no-python", "m", "module", "run-path", "use-env"})
_PYTHON = re.compile(r"python(?:\d(?:\.\d+)?)?$")
_MODULES = frozenset({"torch.distributed.run", "torch.distributed.launch", "embark.torchrun"})
_FROM_ENVIRONMENT = ("nnodes", "nproc-per-node", "node-rank", "master-addr", "master-port", "rdzv-backend",
                     "rdzv-endpoint", "rdzv-id", "rdzv-conf", "max-restarts")


@dataclass(frozen=True, slots=True)
class Launch:
    """One start of a program that trains."""

    program: str
    """`torchrun`, `python`, or what else it is."""
    options: Mapping[str, str]
    """Of torchrun: by long name, with hyphens."""
    script: str
    """What is run: a path, or a module."""
    is_module: bool
    argv: tuple[str, ...]
    is_in_shell: bool

    @property
    def is_torchrun(self) -> bool:
        return self.program == "torchrun"

    @property
    def nnodes(self) -> tuple[int, int] | None:
        """At least and at most; None where it is not said, or is a variable."""
        low, _, high = self.options.get("nnodes", "").partition(":")
        try:
            return int(low), int(high or low)
        except ValueError:
            return None

    @property
    def nproc(self) -> int | None:
        try:
            return int(self.options.get("nproc-per-node", ""))
        except ValueError:
            return None

    @property
    def endpoint(self) -> str:
        """`host:port` where the ranks meet; empty where it is not said."""
        if "rdzv-endpoint" in self.options:
            return self.options["rdzv-endpoint"]
        host = self.options.get("master-addr", "")
        return f"{host}:{self.options.get('master-port', '29500')}" if host else ""

    @property
    def endpoint_host(self) -> str:
        return self.endpoint.rpartition(":")[0] if re.search(r":\d+$|:\$", self.endpoint) else self.endpoint

    @property
    def is_c10d(self) -> bool:
        return self.options.get("rdzv-backend") == "c10d"


def launch_of_words(words: Sequence[Word], is_in_shell: bool = False,
                    environment: Mapping[str, str] | None = None) -> Launch | None:
    """What an argument list starts. A shell's `-c` text is read for the command in it that trains."""
    argv = [word.text for word in words]
    if not argv:
        return None
    name = argv[0].rpartition("/")[2]
    if name in SHELLS:
        text = next((argv[i + 1] for i, word in enumerate(argv[:-1]) if re.fullmatch(r"-\w*c", word)), "")
        return launch_of_text(text, environment)
    command = make_command(list(words))
    return launch_of_command(command, is_in_shell, environment) if command else None


def launch_of_text(text: str, environment: Mapping[str, str] | None = None) -> Launch | None:
    """The last start of a launcher in a shell text, else the last of Python, else the last command."""
    source = Source.of(Path("command"), text)
    commands = read_shell(source)
    set_here = {name: value for command in commands for name, value, _ in command.assignments}
    known = {**(environment or {}), **set_here}
    launches = [made for command in commands if (made := launch_of_command(command, True, known))]
    for wanted in ("torchrun", "python"):
        for launch in reversed(launches):
            if launch.program == wanted:
                return launch
    return launches[-1] if launches else None


def launch_of_command(command: Command, is_in_shell: bool = True,
                      environment: Mapping[str, str] | None = None) -> Launch | None:
    argv = command.argv
    if not argv:
        return None
    name, rest = command.name, argv[1:]
    if _PYTHON.match(name):
        while rest and rest[0].startswith("-") and rest[0] not in ("-m", "-c"):
            rest = rest[1:]
        if rest[:1] == ["-m"] and rest[1:2] and rest[1] in _MODULES:
            return _torchrun(rest[2:], argv, is_in_shell, environment)
        if rest[:1] == ["-m"]:
            return Launch("python", {}, rest[1] if rest[1:] else "", True, tuple(argv), is_in_shell)
        return Launch("python", {}, rest[0] if rest else "", False, tuple(argv), is_in_shell)
    if name == "torchrun":
        return _torchrun(rest, argv, is_in_shell, environment)
    return Launch(name, {}, "", False, tuple(argv), is_in_shell)


def words_of(node: Node) -> list[Word]:
    """A YAML list as words."""
    return [Word(item.text, item.place or Place(Source.of(Path(""), ""), 0, 0)) for item in node if item.items is None]


def _torchrun(rest: Sequence[str], argv: Sequence[str], is_in_shell: bool,
              environment: Mapping[str, str] | None) -> Launch:
    options: dict[str, str] = {}
    is_module, at = False, 0
    while at < len(rest) and rest[at].startswith("-"):
        name, equals, value = rest[at].lstrip("-").partition("=")
        name = name.replace("_", "-")
        at += 1
        if name in ("m", "module"):
            is_module = True
        elif name in _SWITCHES:
            options[name] = "true"
        elif equals:
            options[name] = value
        elif at < len(rest):
            options[name] = rest[at]
            at += 1
    for name in _FROM_ENVIRONMENT:
        inherited = (environment or {}).get("PET_" + name.replace("-", "_").upper())
        if inherited:
            options.setdefault(name, inherited)
    return Launch("torchrun", options, rest[at] if at < len(rest) else "", is_module, tuple(argv), is_in_shell)
