"""Which torch, torchrec and fbgemm go together, which are installed here, and what to run where they do not match.

A wrong mix dies at import with an ABI error that names none of the three, so this looks at versions before anything
imports torch. It needs only the standard library, and runs before anything is installed:

    python3 src/embark/stack/versions.py install --python .venv/bin/python
"""

import argparse
import importlib.metadata
import importlib.util
import json
import os
import re
import shlex
import shutil
import sys
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

Variant = Literal["cpu", "cuda"]

UNKNOWN = "unknown"
"""The version of a package that can be imported and has no metadata: a source tree on PYTHONPATH. It is let through."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One package: what is installed, what should be, and the fix."""

    name: str
    ok: bool
    found: str | None
    expected: str
    fix: str = ""  # A command to run, or a sentence; empty where `ok`.

    def __str__(self) -> str:
        seen = f"{self.name}: {'missing' if self.found is None else self.found}"
        return seen if self.ok else f"{seen}; expected {self.expected}. Fix: {self.fix}"


@dataclass(frozen=True, slots=True)
class Triple:
    """One row of versions.toml, with what is installed next to it."""

    torch: str
    torchrec: str
    fbgemm: str
    torchmetrics: str
    needs: tuple[str, ...]
    distributions: tuple[tuple[Variant, str], ...]
    """The name fbgemm is published under, for each variant that has wheels."""
    pythons: tuple[str, ...]
    is_default: bool

    @property
    def torch_minor(self) -> str:
        return _minor(self.torch)

    def fbgemm_distribution(self, variant: Variant) -> str:
        return dict(self.distributions)[variant]

    def pip_arguments(self, variant: Variant) -> list[list[str]]:
        """Return the `pip install` commands, in order, that put this triple in."""
        fbgemm = f"{self.fbgemm_distribution(variant)}=={self.fbgemm}"
        torchrec = f"torchrec=={self.torchrec}"
        rest = [f"torchmetrics=={self.torchmetrics}", *self.needs]
        if variant == "cuda":
            return [["install", f"torch=={self.torch}", fbgemm, torchrec, *rest]]
        # torchrec demands fbgemm-gpu by name, which is the CUDA build: half a gigabyte that a CPU cannot load.
        return [["install", f"torch=={self.torch}", fbgemm, *rest], ["install", "--no-deps", torchrec]]


@cache
def load_triples() -> tuple[Triple, ...]:
    """Return the triples of versions.toml, oldest torch first."""
    table = tomllib.loads(Path(__file__).with_name("versions.toml").read_text(encoding="utf-8"))
    packages, names = table["packages"], table["fbgemm"]
    variants: tuple[Variant, ...] = ("cpu", "cuda")
    return tuple(
        Triple(
            torch=row["torch"], torchrec=row["torchrec"], fbgemm=row["fbgemm"], torchmetrics=packages["torchmetrics"],
            needs=tuple(packages["needs"]), distributions=tuple((v, names[v]) for v in variants if row[v] != "no"),
            pythons=tuple(row["python"]), is_default=_minor(row["torch"]) == table["default"]
        )
        for row in table["triple"]
    )


def default_triple() -> Triple:
    return next(triple for triple in load_triples() if triple.is_default)


def installed() -> dict[str, str | None]:
    """Return versions of the distributions installed here, without importing any; under both names of fbgemm."""
    triple = default_triple()
    versions = {
        name: _version(name)
        for name in ("torch", "torchrec", "fbgemm-gpu", "fbgemm-gpu-cpu", "torchmetrics", *triple.needs)
    }
    for name, module in (("torch", "torch"), ("torchrec", "torchrec")):
        if versions[name] is None and _importable(module):
            versions[name] = UNKNOWN
    if versions["fbgemm-gpu"] is versions["fbgemm-gpu-cpu"] is None and _importable("fbgemm_gpu"):
        versions["fbgemm-gpu"] = UNKNOWN
    return versions


def check(installed: Mapping[str, str | None], *, gpu: bool = False) -> list[Finding]:
    """Return one finding a package, judged against the triple of the installed torch, or the nearest one.

    `gpu` says that this machine has an NVIDIA GPU: it chooses the build of fbgemm where nothing installed has chosen.
    """
    triple, variant = _reference(installed), _variant(installed, gpu=gpu)
    goes_with = f"for torch {triple.torch_minor}"
    minors = {t.torch_minor for t in load_triples()}
    torch, torchrec = installed.get("torch"), installed.get("torchrec")
    torch_ok = torch == UNKNOWN or (torch is not None and _minor(torch) in minors)
    return [
        Finding("torch", torch_ok, torch, triple.torch, "" if torch_ok else _pip("install", f"torch=={triple.torch}")),
        _exact("torchrec", torchrec, triple.torchrec, goes_with, ["--no-deps"] if variant == "cpu" else []),
        _check_fbgemm(installed, triple, variant, goes_with),
        _exact("torchmetrics", installed.get("torchmetrics"), triple.torchmetrics, "for torchrec's metrics"),
        *(Finding(name, found is not None, found, "any version", "" if found else _pip("install", name))
          for name in triple.needs for found in [installed.get(name)])
    ]


def require_stack() -> None:
    """Raise `MissingPackage`, with the commands that fix it, unless `import torchrec` can be expected to work.

    EMBARK_ANY_STACK=1 lets any versions through, for builds from source; it does not excuse a missing package.
    """
    from embark.errors import MissingPackage  # not at the top: as a script this runs before Embark is installed

    here = installed()
    gpu = has_nvidia_gpu()
    # torchmetrics is read by torchrec.metrics alone: a wrong one is the doctor's to report, not a reason to stop.
    wrong = [finding for finding in check(here, gpu=gpu) if not finding.ok and finding.name != "torchmetrics"]
    missing = [finding.name for finding in wrong if finding.found is None]
    if not wrong or (not missing and os.getenv("EMBARK_ANY_STACK") == "1"):
        return
    triple, variant = _reference(here), _variant(here, gpu=gpu)
    good = f"torch {triple.torch}, torchrec {triple.torchrec} and {triple.fbgemm_distribution(variant)} {triple.fbgemm}"
    if missing:
        verb = "is" if len(missing) == 1 else "are"
        what = f"{', '.join(missing)} {verb} not installed; training needs {good}"
    else:
        have = [f"{name} {here[name]}" for name in ("torch", "torchrec", "fbgemm-gpu", "fbgemm-gpu-cpu") if here[name]]
        what = f"{', '.join(have)} do not work together; {good} do"
    raise MissingPackage(what, "\n       ".join(_pip(*c) for c in _commands(here, triple, variant)))


def has_nvidia_gpu() -> bool:
    """Return whether this process may use a GPU. The driver's file alone shows through into containers that were given
    none."""
    if Path("/proc/driver/nvidia/version").exists() and any(Path("/dev").glob("nvidia[0-9]*")):
        return True
    return bool(nvidia_smi("-L"))


def nvidia_smi(*arguments: str) -> list[str]:
    """Return the lines nvidia-smi prints; none where there is no such program, no driver or no GPU."""
    import subprocess

    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    try:
        done = subprocess.run([program, *arguments], capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return [line for line in done.stdout.splitlines() if line.strip()] if done.returncode == 0 else []


def _check_fbgemm(here: Mapping[str, str | None], triple: Triple, variant: Variant, goes_with: str) -> Finding:
    right = triple.fbgemm_distribution(variant)
    others = [name for _, name in triple.distributions if name != right and here.get(name)]
    if not others:
        return _exact(right, here.get(right), triple.fbgemm, goes_with)
    found = " and ".join(f"{name} {here[name]}" for name in (right, *others) if here.get(name))
    why = "alone: both write the package fbgemm_gpu" if here.get(right) else f"the {variant} build, as torch is"
    # Whichever is removed takes the other's files with it, so the right one is put in again.
    fix = f"{_pip('uninstall', '-y', right, *others)} && {_pip('install', f'{right}=={triple.fbgemm}')}"
    return Finding(right, False, found, f"{right} {triple.fbgemm}, {why}", fix)


def _exact(name: str, found: str | None, version: str, why: str, options: Sequence[str] = ()) -> Finding:
    ok = found == UNKNOWN or (found is not None and _public(found) == version)
    return Finding(name, ok, found, f"{version}, {why}", "" if ok else _pip("install", *options, f"{name}=={version}"))


def _reference(here: Mapping[str, str | None]) -> Triple:
    """Return the triple to judge by: that of the torch that is here, else of torchrec and fbgemm, else the default."""
    torch, torchrec = here.get("torch"), here.get("torchrec")
    fbgemm = here.get("fbgemm-gpu") or here.get("fbgemm-gpu-cpu")
    for triple in load_triples():
        if torch and triple.torch_minor == _minor(torch):
            return triple
    for triple in load_triples():
        if torchrec and fbgemm and (triple.torchrec, triple.fbgemm) == (_public(torchrec), _public(fbgemm)):
            return triple
    return default_triple()


def _variant(here: Mapping[str, str | None], *, gpu: bool) -> Variant:
    """Return which build of fbgemm belongs here: torch's, else the installed one, else the machine's."""
    local = (here.get("torch") or "").partition("+")[2]
    cuda, cpu = here.get("fbgemm-gpu"), here.get("fbgemm-gpu-cpu")
    if local == "cpu":
        return "cpu"
    if (cuda is None) != (cpu is None):
        return "cuda" if cuda else "cpu"
    return "cuda" if gpu or local.startswith("cu") else "cpu"


def _commands(here: Mapping[str, str | None], triple: Triple, variant: Variant) -> list[list[str]]:
    """pip's arguments, one list a command, that bring what is here to `triple`."""
    right = triple.fbgemm_distribution(variant)
    wrong = [name for _, name in triple.distributions if name != right and here.get(name) not in (None, UNKNOWN)]
    if wrong and here.get(right):
        wrong.append(right)  # removing one takes the other's files with it
    if variant == "cuda" and (here.get("torch") or "").endswith("+cpu"):
        wrong.append("torch")  # pip takes 2.13.0+cpu for 2.13.0 and would keep it
    remove = [["uninstall", "-y", *wrong]] if wrong else []
    return remove + triple.pip_arguments(variant)


def _pip(*arguments: str) -> str:
    return shlex.join([sys.executable or "python3", "-m", "pip", *arguments])


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _importable(module: str) -> bool:
    spec = importlib.util.find_spec(module)
    return spec is not None and spec.origin is not None


def _minor(version: str) -> str:
    """`2.13` for `2.13.0+cpu` and for `2.13.0a0+git1234`."""
    match = re.match(r"\d+\.\d+", version)
    return match.group() if match else version


def _public(version: str) -> str:
    return version.partition("+")[0]


# The script half: it alone prints and runs pip.


def main(arguments: Sequence[str] | None = None) -> int:
    about = "Install the torch, torchrec and fbgemm that go together."
    parser = argparse.ArgumentParser(prog="versions.py", description=about)
    commands = parser.add_subparsers(dest="command", required=True)
    install = commands.add_parser("install", help="install the triple; nothing is done where it is there")
    install.add_argument("--python", default=sys.executable, help="the interpreter to install for (default: this one)")
    install.add_argument("--variant", choices=("auto", "cpu", "cuda"), default="auto", help="auto: cuda where a GPU is")
    minors = [triple.torch_minor for triple in load_triples()]
    install.add_argument("--torch", choices=minors, help="another triple than the default one")
    install.add_argument("--dry-run", action="store_true", help="print the commands and run none")
    commands.add_parser("installed", help="print what is installed for this interpreter, as JSON")
    commands.add_parser("usable", help="exit 0 where this interpreter can make the environment, else say why not")
    chosen = parser.parse_args(arguments)
    if chosen.command == "installed":
        _say(json.dumps(installed()))
        return 0
    if chosen.command == "usable":
        return _usable()
    return _install(chosen.python, chosen.variant, chosen.torch, dry_run=chosen.dry_run)


def _install(python: str, variant: str, torch: str | None, *, dry_run: bool) -> int:
    import subprocess

    triple = next((t for t in load_triples() if t.torch_minor == torch), default_triple())
    listed = subprocess.run([python, __file__, "installed"], capture_output=True, text=True, check=False)
    if listed.returncode != 0:
        _say(f"{python} does not run, or is older than Python 3.11:\n{listed.stderr.strip()}")
        return 1
    here: dict[str, str | None] = json.loads(listed.stdout)
    build: Variant = "cpu" if variant == "cpu" or (variant == "auto" and not has_nvidia_gpu()) else "cuda"
    right = triple.fbgemm_distribution(build)
    names = f"torch {triple.torch}, torchrec {triple.torchrec}, {right} {triple.fbgemm}"
    same_torch = _minor(here["torch"] or "") == triple.torch_minor
    if same_torch and here[right] and all(finding.ok for finding in check(here)):
        _say(f"Already installed: torch {here['torch']}, torchrec {here['torchrec']}, {right} {here[right]}")
        return 0
    _say(f"{'Would install' if dry_run else 'Installing'} {names}; the first time this takes minutes")
    for command in _commands(here, triple, build):
        line = [python, "-m", "pip", *command]
        _say("  " + shlex.join(line))
        if dry_run:
            continue
        quiet = ["--quiet", "--quiet", "--disable-pip-version-check", "--no-input"]
        code = subprocess.run([*line[:4], *quiet, *line[4:]], check=False).returncode
        if code != 0:
            _say(f"pip failed ({code}); the command above is the one to try by hand")
            return code
    return 0


def _usable() -> int:
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    triple = default_triple()
    if version not in triple.pythons:
        _say(f"{sys.executable} is Python {version}; torch {triple.torch} is for {', '.join(triple.pythons)}")
        return 1
    if importlib.util.find_spec("venv") is None or importlib.util.find_spec("ensurepip") is None:
        _say(f"{sys.executable} lacks the venv module: apt-get install -y python{version}-venv")
        return 1
    return 0


def _say(line: str) -> None:
    print(line, flush=True)  # noqa: T201


if __name__ == "__main__":
    sys.exit(main())
