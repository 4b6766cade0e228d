"""Programs from the system's packages that some tests need: how to tell they are here, and what would get them.

    python tests/support/needs.py packages    # Debian packages of every program the tests name
    python tests/support/needs.py missing     # those of the programs that are not here
    python tests/support/needs.py npm         # npm packages of the programs that are not here

It needs only the standard library: CI runs it before anything is installed.
"""

from __future__ import annotations

import ast
import os
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Tool:
    programs: tuple[tuple[str, ...], ...]
    """One of each group must be on the path."""
    packages: tuple[str, ...]
    npm: tuple[str, ...] = ()
    """Packages of npm that have the programs; `packages` then have npm itself."""

    @property
    def is_here(self) -> bool:
        return all(any(_which(name) for name in group) for group in self.programs)

    @property
    def missing_packages(self) -> tuple[str, ...]:
        return () if self.is_here or self._has_its_npm else self.packages

    @property
    def how_to_get(self) -> str:
        steps = [] if self._has_its_npm else [f"apt-get install -y {' '.join(self.packages)}"]
        steps += [f"npm install -g {' '.join(self.npm)}"] if self.npm else []
        return " && ".join(steps)

    @property
    def _has_its_npm(self) -> bool:
        # It may be from elsewhere, and then Debian's would be in its way.
        return bool(self.npm and _which("npm"))


def _which(name: str) -> str | None:
    # iptables and its like live in sbin, which a user's path often lacks
    return shutil.which(name, path=os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"]))


TOOLS = {
    "podman": Tool(
        (("podman",), ("buildah",), ("runc",), ("iptables",)),
        # The last three are for containers that find each other by name.
        ("podman", "buildah", "runc", "netavark", "aardvark-dns", "iptables"),
    ),
    "chromium": Tool((("chromium", "chromium-browser", "google-chrome"),), ("chromium",)),
    "prometheus": Tool((("prometheus",), ("promtool",)), ("prometheus",)),
    "node": Tool((("node", "nodejs"),), ("nodejs",)),
    "npm": Tool((("npm",),), ("nodejs", "npm")),
    "azurite": Tool((("azurite-blob",),), ("nodejs", "npm"), npm=("azurite@3",)),
    "sshd": Tool((("sshd",), ("ssh",), ("ssh-keygen",)), ("openssh-server", "openssh-client")),
    "slurm": Tool((("slurmctld",), ("slurmd",), ("sbatch",), ("munged",)),
                  ("slurm-wlm", "slurm-wlm-basic-plugins", "munge")),
    "shellcheck": Tool((("shellcheck",),), ("shellcheck",)),
    "strace": Tool((("strace",),), ("strace",)),
    "unshare": Tool((("unshare",), ("mount",)), ("util-linux", "mount")),
    "tmux": Tool((("tmux",),), ("tmux",)),
    "g++": Tool((("g++",),), ("g++",)),
}


def tools_used(tests: Path) -> set[str]:
    """The tools that `@pytest.mark.needs(…)` names anywhere under `tests`, read from the source, not run."""
    # Fixtures may be Python that is wrong on purpose.
    paths = [path for path in sorted(tests.rglob("*.py")) if "fixtures" not in path.relative_to(tests).parts]
    return {name for path in paths for name in _named_in(path)}


def _named_in(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), filename=str(path))):
        if not (isinstance(node, ast.Call) and ast.unparse(node.func) == "pytest.mark.needs"):
            continue
        for argument in node.args:
            name = argument.value if isinstance(argument, ast.Constant) else None
            if name not in TOOLS:
                known = ", ".join(TOOLS)
                sys.exit(f"{path}:{node.lineno}: needs({ast.unparse(argument)}): write one of {known}, as a literal")
            yield str(name)


def main(words: list[str]) -> int:
    listed = {
        "packages": lambda tool: tool.packages,
        "missing": lambda tool: tool.missing_packages,
        "npm": lambda tool: () if tool.is_here else tool.npm,
    }.get(" ".join(words))
    if not listed:
        print(__doc__, file=sys.stderr)
        return 2
    tests = Path(__file__).parents[1]
    tools = [TOOLS[name] for name in tools_used(tests) | tools_used(tests.parent / "cloudsim" / "tests")]
    for package in sorted({package for tool in tools for package in listed(tool)}):
        print(package)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
