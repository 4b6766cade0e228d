"""The base of the image, of this machine's own programs, Python and packages: no registry can be counted on.

It has torch, as PyTorch's own image does, and what else pip would take minutes for. TorchRec, fbgemm and Embark are
left for the Dockerfile to install.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable
from importlib.metadata import Distribution, distribution
from importlib.util import cache_from_source
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

DEBIAN = ("base-files", "bash", "dash", "coreutils", "findutils", "grep", "hostname", "libc6", "libc-bin", "login",
          "passwd", "sed", "util-linux", "libgcc-s1", "libstdc++6")
NOT_NEEDED = re.compile(r"/usr/share/(doc|info|locale|man|lintian|bash-completion)/")
MERGED = ("bin", "lib", "lib64", "sbin")
FILES = {
    "etc/passwd": "root:x:0:0:root:/root:/bin/bash\n", "etc/group": "root:x:0:\n", "etc/shadow": "", "etc/gshadow": "",
    "etc/nsswitch.conf": "hosts: files dns\n",
}
IN_BASE = ("torch", "torchmetrics", "tensordict", "iopath", "pyre-extensions", "embark-rec[cloud,columns,tensorboard]")
"""With what they need."""
LEFT_FOR_PIP = {"embark-rec", "torchrec", "fbgemm-gpu-cpu"}
LIBRARY = re.compile(r"^\t(?:\S+ => )?(/\S+) \(0x", re.MULTILINE)


def make_base(rootfs: Path) -> None:
    """Without the packages."""
    for name in MERGED:
        (rootfs / "usr" / name).mkdir(parents=True)
        (rootfs / name).symlink_to(f"usr/{name}")
    for name in ("dev", "proc", "run", "sys", "tmp", "var/tmp"):
        (rootfs / name).mkdir(parents=True)
        (rootfs / name).chmod(0o1777 if name.endswith("tmp") else 0o755)
    listed = subprocess.run(["dpkg", "--listfiles", *DEBIAN], check=True, text=True, capture_output=True).stdout
    copy_files(rootfs, [name for name in listed.splitlines() if name.startswith("/") and not NOT_NEEDED.match(name)])
    for path, text in FILES.items():
        (rootfs / path).write_text(text)
    copy_python(rootfs)
    programs = [str(path) for path in rootfs.rglob("*") if path.is_file() and not path.is_symlink() and is_elf(path)]
    found = subprocess.run(["ldd", *programs], check=False, text=True, capture_output=True).stdout
    copy_files(rootfs, {name for name in LIBRARY.findall(found) if not name.startswith(str(rootfs))})
    subprocess.run(["/sbin/ldconfig", "-r", str(rootfs)], check=True, capture_output=True)


def is_elf(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(4) == b"\x7fELF"


def copy_files(rootfs: Path, names: Iterable[str]) -> None:
    """To the same places; a link becomes what it leads to."""
    for name in names:
        target = rootfs / os.path.realpath(os.path.dirname(name)).lstrip("/") / os.path.basename(name)
        if os.path.isfile(name) and not target.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(name, target)


def copy_python(rootfs: Path) -> None:
    """The interpreter of this environment and its standard library."""
    version, prefix = f"python{sys.version_info.major}.{sys.version_info.minor}", Path(sys.base_prefix)
    shutil.copytree(prefix / "lib" / version, rootfs / str(prefix / "lib" / version).lstrip("/"), symlinks=True,
                    ignore=shutil.ignore_patterns("site-packages", "dist-packages", "test", "config-*"))
    files = [prefix / "bin" / version, *(prefix / "lib").glob("libpython*")]
    files += Path("/usr/share/python-wheels").glob("*")  # Debian's Python has its pip there
    copy_files(rootfs, map(str, files))
    (rootfs / "usr/bin/python3").symlink_to(files[0])


def site_packages(rootfs: Path) -> str:
    """Where any environment of the base's Python may see packages; made if it is not there."""
    ask = ["python3", "-I", "-c", "import site; print(site.getsitepackages()[0])"]
    found = subprocess.run(["chroot", str(rootfs), *ask], check=True, text=True, capture_output=True).stdout.strip()
    (rootfs / found.lstrip("/")).mkdir(parents=True, exist_ok=True)
    return found


def gather_packages(folder: Path) -> None:
    """What the base has, with its bytecode."""
    import embark.trainers.torch.trainer  # noqa: F401  what a rank imports is compiled by now

    for package in needed(IN_BASE):
        root = Path(str(package.locate_file("")))
        names = [str(name) for name in package.files or () if ".." not in name.parts]
        for name in {*names, *(cache_from_source(name) for name in names if name.endswith(".py"))}:
            if (root / name).is_file():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                link(root / name, folder / name)


def link(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError:  # on another disk
        shutil.copy2(source, target)


def needed(requirements: Iterable[str]) -> list[Distribution]:
    """The packages here that these need, without those that pip is to install."""
    found: dict[str, Distribution] = {}
    left, seen = [Requirement(one) for one in requirements], set()
    while left:
        wanted = left.pop()
        name = canonicalize_name(wanted.name)
        for extra in {"", *wanted.extras} - {extra for one, extra in seen if one == name}:
            seen.add((name, extra))
            found[name] = distribution(name)
            every = map(Requirement, found[name].requires or ())
            left += [one for one in every if one.marker is None or one.marker.evaluate({"extra": extra})]
    return [one for name, one in found.items() if name not in LEFT_FOR_PIP]
