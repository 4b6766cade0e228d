"""The layout of a run: `<root>/<name>`, on this machine or behind a uri.

    spec.toml  plan.txt  events.jsonl  dead_letters.jsonl  report.html  tracking_id  tensorboard/  checkpoints/  data/
    lease/
"""

import hashlib
import os
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from pathlib import Path

from embark.errors import UserError, nearest
from .atomic_file import scratch_for
from .checkpoint_store import CheckpointStore
from .lease import Lease
from .object_store import ObjectStore, open_store

EVENTS = "events.jsonl"
DEAD_LETTERS = "dead_letters.jsonl"  # Records of a stream that could not be trained on.
SPEC = "spec.toml"
TRACKING_ID = "tracking_id"
TUNE = "tune.json"  # File next to the runs that are trials of one search.
SMALL_FILES = (SPEC, "plan.txt", EVENTS, DEAD_LETTERS, "report.html", TRACKING_ID)
MAX_FILES = 20_000
LOG_FOLDERS = ("logs", "ranks")  # Folders for torchrun's logs.


@dataclass(frozen=True)
class RunDir:
    """A run's files. If it has a remote uri, the small ones are written on this machine and copied there at each
    save."""

    uri: str
    lease: Lease | None = field(default=None, compare=False, repr=False)
    """The lease, on the first rank of the process that trains the run."""
    attempt: int = field(default=1, compare=False)
    """The token of the lease under which this start began."""
    is_fresh: bool = field(default=False, compare=False)
    """Whether this start was to be in a directory that no other has used: `--fresh`."""

    @property
    def is_remote(self) -> bool:
        return "://" in self.uri and not self.uri.startswith("file://")

    @cached_property
    def path(self) -> Path:
        """The folder on this machine that has the small files."""
        if not self.is_remote:
            return Path(self.uri.removeprefix("file://")).expanduser()
        cache = Path(os.getenv("EMBARK_CACHE", "~/.cache/embark")).expanduser()
        return cache / "runs" / hashlib.sha256(self.uri.encode()).hexdigest()[:16] / self.uri.rsplit("/", 1)[-1]

    @property
    def spec(self) -> Path:
        return self.path / SPEC

    @property
    def plan(self) -> Path:
        return self.path / "plan.txt"

    @property
    def events(self) -> Path:
        return self.path / EVENTS

    @property
    def tracking_id(self) -> Path:
        """The file with the id under which W&B and MLflow know the run."""
        return self.path / TRACKING_ID

    @property
    def tensorboard(self) -> Path:
        return self.path / "tensorboard"

    @cached_property
    def store(self) -> ObjectStore:
        return open_store(self.uri if self.is_remote else self.path)

    @cached_property
    def checkpoints(self) -> CheckpointStore:
        folder = f"{self.uri}/checkpoints" if self.is_remote else self.path / "checkpoints"
        return CheckpointStore(open_store(folder), self.check_lease)

    def check_lease(self) -> None:
        """Raise `RunInUse` if another process has taken over a run that this one held."""
        if self.lease is not None:
            self.lease.check()

    def exists(self) -> bool:
        return bool(self.store.list()) if self.is_remote else self.path.exists()

    def fetch(self) -> None:
        """Download the small files, so that a run can continue on another machine."""
        if self.is_remote:
            there = {e.path for e in self.store.list()}
            here = self.events.read_bytes() if self.events.is_file() else b""
            if here and here.startswith(self.store.read(EVENTS) if EVENTS in there else b""):
                # A process of this machine that was killed had published less than it wrote.
                # A copy: an earlier process, paused beyond its lease, may have the file open and would add to it.
                there.discard(EVENTS)
                with scratch_for(self.events) as scratch:
                    scratch.write_bytes(here)
            self.store.download_many([(n, self.path / n) for n in SMALL_FILES if n in there])

    def publish(self) -> None:
        """Copy the small files to the uri of the run."""
        if self.is_remote:
            self.check_lease()
            curves = sorted(p for p in files_below(self.tensorboard) if p.is_file())
            small = [self.path / name for name in SMALL_FILES if (self.path / name).is_file()]
            self.store.upload_many([(p, p.relative_to(self.path).as_posix()) for p in [*small, *curves]])


def files_below(folder: Path) -> list[Path]:
    """List the files of a run's folder; no link to a folder is followed, the folder itself included: it may lead
    anywhere."""
    if folder.is_symlink():
        return []
    found = (Path(where, name) for where, _, names in os.walk(folder) for name in names)
    return list(islice(found, MAX_FILES))


def find_run(word: str, root: str = "runs") -> RunDir:
    """Find the run that a person means: its directory, its name under `root`, or its uri."""
    here = [RunDir(uri) for uri in (word, run_uri(root, word)) if Path(uri.removeprefix("file://")).expanduser().is_dir()]
    if "://" in word and not word.startswith("file://"):
        here = [RunDir(word.rstrip("/"))]
    for run in here:
        if run.store.exists(SPEC) or run.store.exists(EVENTS) or run.checkpoints.store.list():
            return run
    if here:
        raise UserError(f"{here[0].uri} is not a run's directory: it has neither {SPEC} nor {EVENTS} nor checkpoints/",
                        "name the directory that `embark train` wrote, such as runs/quickstart")
    names = [path.name for path in Path(root).glob("*") if path.is_dir()] if Path(root).is_dir() else []
    raise UserError(f"{word}: no such run, neither a directory nor a name under {root}/",
                    nearest(word, names) if names else "`embark train` writes one; a uri is one too")


def run_uri(root: str, name: str) -> str:
    return f"{root.rstrip('/')}/{name}" if root.rstrip("/") else f"/{name}"


def first_free_run(root: str, name: str) -> RunDir:
    """Return the run of that name, or of `name-2`, `name-3`, …: the first that does not exist yet."""
    number, free = 1, RunDir(run_uri(root, name))
    while free.exists():
        number += 1
        free = RunDir(run_uri(root, f"{name}-{number}"))
    return free


def user_cache() -> Path:
    """Return the user's cache directory: what any run of this user may use again, and what may be deleted at any
    time."""
    return Path(os.getenv("XDG_CACHE_HOME") or "~/.cache").expanduser() / "embark"


def compiled_code_folder(compiler: str, otherwise: Path) -> Path:
    """Return the folder where a compiler keeps what it compiled for all runs of this user; `otherwise` if it cannot be
    written, as in a container whose user has no home."""
    try:
        folder = user_cache().absolute() / compiler
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, RuntimeError):  # RuntimeError: there is no home directory to expand `~` to
        return otherwise
    return folder if os.access(folder, os.W_OK | os.X_OK) else otherwise
