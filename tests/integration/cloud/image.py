"""The quickstart's image, built for real and once by `embark image`: every worker of a session finds the same.

Its base is made of this machine's files, of which the packages are mounted: a layer of them would take a minute. pip
finds the others as it does here, where no index has Embark.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from integration.cloud.base_image import gather_packages, make_base, site_packages
from limits import HANG_S

ROOT = Path(__file__).parents[3]
NAME = "localhost/embark:test"
BASE = "localhost/base:1"
LIMITS = ("--ulimit", "nofile=20000:20000", "--ulimit", "nproc=4096:4096")
DRIVERS = ("overlay", "vfs")
"""vfs copies the whole image for every container, and works everywhere."""


@dataclass(frozen=True)
class Store:
    """Images and containers in a folder of their own."""

    folder: Path
    driver: str

    @property
    def options(self) -> list[str]:
        return ["--storage-driver", self.driver, "--root", str(self.folder / "store"),
                "--runroot", str(self.folder / "run")]

    @property
    def wrapper(self) -> Path:
        """A folder for the path, with a podman in it that keeps its images here, and gives each container packages."""
        return self.folder / "bin"

    @property
    def packages(self) -> Path:
        return self.folder / "packages"

    @property
    def clone(self) -> Path:
        """What a fresh clone has, and in its quickstart's folder the files that the image was built of."""
        return self.folder / "clone"

    @property
    def quickstart(self) -> Path:
        return self.clone / "examples" / "cloud_deployment" / "quickstart"

    def embark(self, *words: str, timeout: float = HANG_S) -> subprocess.CompletedProcess[str]:
        """Of the clone, in its quickstart's folder."""
        env = {**os.environ, "PATH": f"{self.wrapper}{os.pathsep}{os.environ['PATH']}", "BUILDAH_ISOLATION": "chroot",
               "PYTHONPATH": str(self.clone / "src")}
        return subprocess.run([sys.executable, "-m", "embark", *words], cwd=self.quickstart, env=env, text=True,
                              capture_output=True, timeout=timeout, check=False)

    def podman(self, *words: str, timeout: float = HANG_S, check: bool = True, **options: Any):
        command = [str(self.wrapper / "podman"), *words]
        done = subprocess.run(command, text=True, capture_output=True, timeout=timeout, check=False, **options)
        assert not check or done.returncode == 0, done.stdout + done.stderr
        return done

    def run(self, *words: str, options: tuple[str, ...] = (), check: bool = True):
        return self.podman("run", "--rm", "--network", "none", *LIMITS, *options, NAME, *words, check=check)


@contextmanager
def shared_store(common: Path) -> Iterator[Store]:
    """The store with the image in it; made by the first who asks under `common`, removed by the last who leaves."""
    with _shared_state(common) as result:
        if not result:
            folder = Path(mkdtemp(prefix="embark-image-", dir="/tmp"))
            try:
                store = make_store(folder)
            except BaseException:
                shutil.rmtree(folder, ignore_errors=True)
                raise
            result |= {"folder": str(store.folder), "driver": store.driver, "num_users": 0}
        result["num_users"] += 1
    try:
        yield Store(Path(result["folder"]), result["driver"])
    finally:
        with _shared_state(common) as result:
            result["num_users"] -= 1
            if not result["num_users"]:
                remove(Store(Path(result["folder"]), result["driver"]))
                result.clear()


@contextmanager
def _shared_state(common: Path) -> Iterator[dict[str, Any]]:
    """What the workers know together; one at a time."""
    path = common / "embark-image.json"
    with path.open("a+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        payload = json.loads(file.read() or "{}")
        yield payload
        file.truncate(0)
        file.write(json.dumps(payload))


def make_store(folder: Path) -> Store:
    rootfs = folder / "rootfs"
    make_base(rootfs)
    gather_packages(folder / "packages")
    store = next(store for store in (Store(folder, driver) for driver in DRIVERS) if can_run(store, rootfs))
    shutil.rmtree(rootfs)
    make_clone(store.clone)
    built = build(store)
    assert built.returncode == 0, (built.stdout + built.stderr)[-4000:]
    return store


def write_wrapper(store: Store, mounted_at: str) -> None:
    podman = store.wrapper / "podman"
    podman.parent.mkdir(exist_ok=True)
    podman.write_text(f'''#!/bin/sh
case $1 in run|build) verb=$1; shift; set -- "$verb" --volume {store.packages}:{mounted_at}:ro "$@" ;; esac
case $1 in run) cd {store.folder} ;; esac  # where its monitor may write a file `oom`
exec {shutil.which("podman")} {" ".join(store.options)} --runtime runc "$@"
''')
    podman.chmod(0o755)


def make_clone(folder: Path) -> None:
    """The files that git has, or would have: what is being worked on is tested."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, text=True, capture_output=True, check=True).stdout
    for name in listed.split("\0"):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)


def remove(store: Store) -> None:
    """With overlay, what is mounted must be let go first."""
    store.podman("rm", "--all", "--force", check=False)
    forget(store)
    shutil.rmtree(store.folder, ignore_errors=True)


def forget(store: Store) -> None:
    subprocess.run(["umount", str(store.folder / "store" / "overlay")], check=False, capture_output=True)
    shutil.rmtree(store.folder / "store", ignore_errors=True)


def can_run(store: Store, rootfs: Path) -> bool:
    """Takes the base in, and a container of it runs."""
    write_wrapper(store, site_packages(rootfs))
    with subprocess.Popen(["tar", "-C", str(rootfs), "-c", "."], stdout=subprocess.PIPE) as tar:
        taken = store.podman("import", "-", BASE, stdin=tar.stdout, check=False)
    if taken.returncode == 0 and tar.returncode == 0:
        tried = store.podman("run", "--rm", "--network", "none", *LIMITS, BASE, "true", check=False)
        if tried.returncode == 0:
            return True
    forget(store)
    return False


def build(store: Store) -> subprocess.CompletedProcess[str]:
    """By one command in a fresh clone."""
    arguments, volumes = as_pip_is_configured()
    on_cpu = [word for pair in (f"BASE={BASE}", "VARIANT=cpu") for word in ("--build-arg", pair)]
    return store.embark("image", "run.toml", "--builder", "podman", "--tag", NAME, "--", "--layers=false",
                        "--network", "host", *volumes, *arguments, *on_cpu)


def as_pip_is_configured() -> tuple[list[str], list[str]]:
    """pip's own settings as build arguments, and the folders that they name as volumes."""
    listed = subprocess.run([sys.executable, "-m", "pip", "config", "list"], text=True, capture_output=True, check=True)
    pairs = [line.partition("=") for line in listed.stdout.splitlines()]
    found = {name.rpartition(".")[2]: value.strip("'\"") for name, _, value in pairs}
    arguments, folders = [], {"/etc/ssl/certs"}
    for option in ("index-url", "extra-index-url", "find-links"):
        if value := found.get(option):
            arguments += ["--build-arg", f"PIP_{option.replace('-', '_').upper()}={value}"]
            folders |= {"/".join(word.removeprefix("file://").split("/")[:3]) for word in value.split()
                        if word.startswith(("file:///", "/"))}
    there = [folder for folder in sorted(folders) if Path(folder).exists()]
    volumes = [word for folder in there for word in ("--volume", f"{folder}:{folder}:ro")]
    if Path("/etc/pip.conf").exists():
        volumes += ["--volume", "/etc/pip.conf:/etc/pip.conf:ro"]
    return arguments, volumes


def common_folder(own: Path) -> Path:
    """Of all workers of the session: pytest gives each a folder below it."""
    return own.parent if "PYTEST_XDIST_WORKER" in os.environ else own
