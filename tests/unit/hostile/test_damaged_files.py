"""A damaged file ends no command in a traceback, and costs nothing but what it holds.

Each format's files are written by Embark's own commands and then damaged, some with checksums that fit again. Every
command that reads them must end with a code of the table and name the file; other runs, versions and checkpoints stay
usable; nothing is written elsewhere.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import re
import resource
import signal
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hostile_files import NUM, damages, marks_of, restore
from hostile_project import RENDER, STREAM
from limits import HANG_S

from embark.__main__ import run
from embark.catalog.load import clear_cache as forget_prices
from embark.dashboard import api
from embark.dashboard.runs import Runs
from embark.data.stream.open_reader import OPTIONS, client_options
from embark.errors import EmbarkError, ExitCode
from embark.launch.backend import RunHandle
from embark.launch.backends.machines import submitted_s
from embark.plan.calibration import clear_cache as forget_calibrations
from embark.report.run_files import find_runs

Command = tuple[str, ...] | Callable[[], int]
CODES = {ExitCode.DONE, ExitCode.OTHER, ExitCode.BAD_INPUT, ExitCode.FAULT}
EXTRA_BYTES = 4 << 30
LEAST_FILES = 20  # Damaged files that each command reads when hundreds are tried.
LAUNCHED = "share/embark/runs/local/away"


@dataclass(frozen=True)
class Case:
    """Files of a format, the commands that read them, and those that must go on as if nothing had happened."""

    format: str
    file: str
    form: str
    commands: Sequence[Command]
    bystanders: Sequence[Command] = ()
    refit: Callable[[Path], None] | None = None  # Makes the checksums fit the damaged file.
    named: tuple[str, ...] = ()  # Names that a message may have instead of the file's.


def watch() -> int:
    """Read all runs as `embark watch` does, and make its page."""
    runs = Runs(find_runs([]))
    runs.find()
    for one in runs.all():
        while one.look(time.time()):
            pass
        json.dumps(api.detail(one, time.time()))
    assert {"clicks", "other", "stream"} <= {one.name for one in runs.all()}
    return 0


def submission() -> int:
    """Read when a run was submitted, as every command about cloud machines does."""
    handle = RunHandle("away", "aws", {"folder": str(Path(LAUNCHED).absolute())}, run_uri="")
    return 0 * int(submitted_s(handle) or 0)


def options() -> int:
    """Read a broker's options, as `embark follow` does."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv(OPTIONS, "options.toml")
        return 0 * len(client_options())


def refit_part(path: Path) -> None:
    """Write the part's size and checksum into the manifest."""
    manifest = Path("data/manifest.json")
    values = json.loads(manifest.read_text())
    for parts in values["parts"].values():
        for part in parts:
            if part["file"] == path.relative_to(Path("data").absolute()).as_posix():
                part |= {"bytes": path.stat().st_size, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}
    manifest.write_text(json.dumps(values))


def refit_id_map(path: Path) -> None:
    manifest = Path("data/manifest.json")
    values = json.loads(manifest.read_text())
    for about in values["settings"]["id_maps"].values():
        digest = hashlib.sha256()
        for name in ("keys", "ids"):
            digest.update(hashlib.sha256((Path("data") / about[name]).read_bytes()).digest())
        about["sha256"] = digest.hexdigest()
    manifest.write_text(json.dumps(values))


def refit_mark(path: Path) -> None:
    """Write the file's size and checksum into the mark of its checkpoint or version."""
    mark = path.with_name("commit.json")
    values = json.loads(mark.read_text())
    values["files"][path.name] = [path.stat().st_size, hashlib.sha256(path.read_bytes()).hexdigest()]
    mark.write_text(json.dumps(values))


SPEC = ("plan", "clicks.toml", "--here")
TRAIN = ("train", "clicks.toml", "--set", "train.num_steps=6")
LISTS: tuple[Command, ...] = (("runs", "list"), watch)
OF_RUN: tuple[Command, ...] = (
    ("cost", "clicks"), ("report", "clicks"), ("diagnose", "clicks"), ("checkpoints", "clicks"),
    ("compare", "clicks", "other"))
OTHER_RUN: tuple[Command, ...] = (("cost", "other"), ("checkpoints", "other", "--verify"), ("runs", "list"), watch)
CHECKPOINTS: tuple[Command, ...] = (
    ("checkpoints", "clicks"), ("checkpoints", "clicks", "--verify"), ("checkpoints", "clicks", "--diff", "4", "6"),
    ("checkpoints", "clicks", "--prune", "--dry-run"), ("export", "clicks", "--to", "exported"),
    ("evaluate", "clicks"), TRAIN)
OLDER_CHECKPOINT: tuple[Command, ...] = (("export", "clicks", "--step", "4", "--to", "older"), *OTHER_RUN)
STATUS: tuple[Command, ...] = (
    ("status",), ("status", "away"), ("logs", "away"), ("cancel", "away", "--yes"), ("cost", "away"))
NEAR: tuple[Command, ...] = (("status", "near"), ("logs", "near"), watch)


def score(version: int) -> tuple[str, ...]:
    return ("score", "model", "rows.csv", "--version", str(version), "--to", "scores.parquet", "--force")


SCORE = ("score", "model", "rows.csv", "--to", "scores.parquet", "--force")
VERSION: tuple[Command, ...] = (score(2), ("rollback", "model", "--list"), ("rollback", "model", "2"))
OTHER_VERSIONS: tuple[Command, ...] = (score(1), score(3))
OF_STEP = ("step-000000006", "step6")
OF_OLD, OF_NEWEST = ("version-000000002", "version2"), ("version-000000003", "version3")
NEW, OLD = "runs/clicks/checkpoints/step-000000006", "model/version-000000002"
LATER = ("data", "prepare", "clicks.toml", "--set", "data.path=later", "--set", "data.prepare.id_map_from=data")
PREPARE = ("data", "prepare", "clicks.toml", "--set", "data.path=half")

CASES = [
    Case("spec", "clicks.toml", "toml", (SPEC, ("data", "check", "clicks.toml"), ("train", "clicks.toml"))),
    Case("spec", "runs/clicks/spec.toml", "toml", (*OF_RUN, ("evaluate", "clicks"), ("export", "clicks")), OTHER_RUN),
    Case("manifest", "data/manifest.json", "json", (
        ("data", "check", "data"), SPEC, ("export", "data", "--ids", "written", "--force"), ("evaluate", "clicks"),
        ("evaluate", "clicks", "--data", "rows.csv"), ("data", "copy", "data", "copy"), ("export", "clicks"), LATER),
         named=("data:",)),
    Case("prepared part", "data/validation/*.bin", "bytes", (("data", "check", "data"), ("evaluate", "clicks"),
         ("train", "clicks.toml", "--set", "name=new")), refit=refit_part, named=("data",)),
    Case("id map", "data/ids/word.*.npy", "array", (
        ("export", "data", "--ids", "written", "--force"), ("export", "clicks", "--to", "exported"),
        ("evaluate", "clicks", "--data", "rows.csv"), LATER), refit=refit_id_map, named=("word",)),
    Case("preparation", "half/.preparing/**/*.json", "json", (PREPARE,), named=("half",)),
    Case("preparation", "half/.preparing/staged/*", "bytes", (PREPARE,), named=("half",)),
    Case("copy state", "copied/.embark-copy.json", "json", (("data", "copy", "data", "copied", "--force"),
         ("data", "copy", "data", "copied"))),
    Case("checkpoint mark", f"{NEW}/commit.json", "json", CHECKPOINTS, OLDER_CHECKPOINT, named=OF_STEP),
    Case("checkpoint index", f"{NEW}/index.json", "json", CHECKPOINTS, OLDER_CHECKPOINT, refit_mark,
         OF_STEP),
    Case("checkpoint arrays", f"{NEW}/rank-*.bin", "bytes", CHECKPOINTS, OLDER_CHECKPOINT, refit_mark,
         OF_STEP),
    Case("spec", f"{NEW}/spec.toml", "toml", CHECKPOINTS, OLDER_CHECKPOINT, refit_mark, OF_STEP),
    Case("stream state", "runs/stream/checkpoints/step-000000003/stream.json", "json", (
        ("follow", "clicks.toml", *(word for one in STREAM for word in ("--set", one)), "--set", "train.num_steps=4"),
        ("checkpoints", "stream", "--verify")), OTHER_RUN, refit_mark, ("step-000000003", "step3")),
    Case("stream files", "events/1.jsonl", "lines", (
        ("follow", "clicks.toml", *(word for one in STREAM for word in ("--set", one)), "--set", "name=again"),)),
    Case("lease", "runs/clicks/lease/*.json", "json", (
        TRAIN, ("runs", "list"), watch,
        ("runs", "remove", "clicks", "--yes")), OTHER_RUN, named=("runs/clicks",)),
    Case("events", "runs/clicks/events.jsonl", "lines", (
        *OF_RUN, TRAIN), OTHER_RUN, named=("runs/clicks", "clicks")),
    Case("registry record", "share/embark/runs/away.*.json", "json", STATUS, (("status",), *NEAR), named=("away",)),
    *(Case("supervisor files", f"{LAUNCHED}/{name}.json", "json", STATUS, NEAR, named=("away",))
      for name in ("started", "state", "ended", "job")),
    Case("version mark", f"{OLD}/commit.json", "json", VERSION, OTHER_VERSIONS, named=OF_OLD),
    Case("artifact", f"{OLD}/artifact.json", "json", VERSION, OTHER_VERSIONS, refit_mark, OF_OLD),
    Case("artifact", "model/version-000000003/artifact.json", "json", (score(3), ("rollback", "model", "--list")),
         (score(1), score(2)), refit_mark, OF_NEWEST),
    Case("reference", f"{OLD}/reference.json", "json", (
        *VERSION, ("publish", "clicks", "--to", "model")), OTHER_VERSIONS, refit_mark, OF_OLD),
    Case("delta", f"{OLD}/delta.safetensors", "tensors", VERSION, OTHER_VERSIONS, refit_mark, OF_OLD),
    *(Case("tensors", f"model/version-000000003/{name}.safetensors", "tensors", (
        score(3), ("rollback", "model", "--list"), ("publish", "clicks", "--to", "model")), (score(1), score(2)),
        refit_mark, OF_NEWEST) for name in ("weights", "id_maps")),
    Case("gate record", f"{OLD}/gate.json", "json", (*VERSION, ("publish", "clicks", "--to", "model")),
         (*OTHER_VERSIONS, score(2)), named=("Version2", "version2")),
    Case("current version", "model/current.json", "json", (
        SCORE, ("rollback", "model", "--list"),
        ("rollback", "model"), ("publish", "clicks", "--to", "model"), ("export", "clicks", "--to", "model"),
        ("rollback", "model", "1")), (*OTHER_VERSIONS, score(2))),
    Case("version numbers", "model/numbers.json", "json", (
        ("export", "clicks", "--to", "model"), ("publish", "clicks", "--to", "model"), ("rollback", "model", "--list")),
        (*OTHER_VERSIONS, score(2))),
    Case("tuning study", "runs/clicks-tune/tune.json", "json", (("tune", "clicks.toml", "--trials", "1"), watch),
         OTHER_RUN, named=("clicks-tune",)),
    Case("tuning study", "runs/clicks-tune/optuna.journal", "lines", (("tune", "clicks.toml", "--trials", "1"),),
         OTHER_RUN, named=("clicks-tune",)),
    Case("submission", f"{LAUNCHED}/submitted.json", "json", (submission,)),
    Case("stream options", "options.toml", "toml", (options,)),
    Case("calibration", "share/embark/calibration.toml", "toml", (SPEC, ("plan", "laptop", "--here"))),
    Case("price file", "prices.csv", "csv", (("catalog", "refresh", "prices.csv"), ("catalog", "list"))),
    Case("price file", "share/embark/prices.csv", "csv", (
        ("catalog", "list"), ("catalog", "refresh", "prices.csv"), ("plan", "quickstart"), ("cost", "clicks"))),
    Case("render record", "deploy/.embark-render.json", "json", (RENDER, (*RENDER, "--diff")), named=("deploy",)),
    Case("manifests", "deploy/kubernetes_job.yaml", "bytes", (("lint", "deploy"), ("diagnose", "deploy"))),
    Case("logs", f"{LAUNCHED}/log", "bytes", (("logs", "away"), ("diagnose", f"{LAUNCHED}/log"),
         ("diagnose", "away"), watch), NEAR),
]


SLOW = {"train", "follow", "tune", "evaluate", "report", "publish", "plan", "render"}
READING = {"checkpoints", "compare", "cost", "diagnose", "logs", "status", "runs list", "data check", "catalog list"}


def of_turn(commands: Sequence[Command], number: int) -> Iterator[Command]:
    """Yield the commands to run on a damaged file: of hundreds of files each goes to one command, of a few each goes to
    all quick commands and in turn to one of those that take long."""
    if NUM:
        in_turn = list(commands)
        random.Random(number // len(commands)).shuffle(in_turn)  # kinds of damage take turns too
        yield in_turn[number % len(commands)]
        return
    slow = [one for one in commands if not callable(one) and one[0] in SLOW]
    yield from (one for one in commands if one not in slow)
    yield from slow[number % max(1, len(slow)) :][:1]


def num_files_of(targets: Sequence[tuple[Case, Path]], case: Case) -> int:
    """Return how many damages of each of a case's files are tried."""
    if not NUM:
        return max(3, -(-8 // len(targets)))
    same = sum(one.commands == case.commands for one, _ in targets)
    return max(-(-NUM // len(targets)), -(-LEAST_FILES * len(case.commands) // same))


def only_reads(command: Command) -> bool:
    return command is watch or (not callable(command) and bool({command[0], " ".join(command[:2])} & READING))


@contextmanager
def bounded() -> Iterator[None]:
    """Limit the memory and the time of a command: a size that a file gives must not be believed."""
    def late(*_: object) -> None:
        raise TimeoutError("the command does not end")

    before = resource.getrlimit(resource.RLIMIT_AS)
    now_bytes = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (now_bytes + EXTRA_BYTES, before[1]))
    handler = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, HANG_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
        resource.setrlimit(resource.RLIMIT_AS, before)


@dataclass
class Trial:
    """What one damage did."""

    capsys: Any
    num_commands: int = 0
    codes: Counter[int] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)

    def run(self, command: Command, about: str, names: Sequence[str]) -> None:
        """Run a command; with names, one that fails must say one of them, and without it must not fail."""
        self.capsys.readouterr()
        self.num_commands += 1
        shown = " ".join(command) if isinstance(command, tuple) else command.__name__
        before = marks_of(Path()) if only_reads(command) else None
        forget_prices()
        forget_calibrations()
        try:
            with bounded():
                code = run(command) if isinstance(command, tuple) else command()
            said = "".join(self.capsys.readouterr())
        except EmbarkError as error:  # of a function, where nothing turns it into a message
            code, said = error.exit_code, str(error)
        except Exception as error:
            frames = [f"{frame.filename.partition('/embark/')[2]}:{frame.lineno}"
                      for frame in traceback.extract_tb(error.__traceback__) if "/src/embark/" in frame.filename]
            self.failures.append(f"{about}: embark {shown}: {error!r:.200} at {frames[-3:]}")
            return
        self.codes[code] += 1
        if before is not None and before != marks_of(Path()):
            self.failures.append(f"{about}: embark {shown}: it changed files")
        words = "".join(said.split())
        if code not in CODES or (code and not names):
            self.failures.append(f"{about}: embark {shown}: code {code}: {said[-300:]}")
        elif code and "".join(names) and not any(name in words for name in names):
            self.failures.append(f"{about}: embark {shown}: code {code} names no file: {said[-300:]}")


@pytest.mark.parametrize("name", sorted({case.format for case in CASES}))
def test_a_damaged_file_is_refused_in_words_and_locally(name, here, template, capsys):
    trial, num_files = Trial(capsys), 0
    cases = [case for case in CASES if case.format == name]
    targets = [(case, path) for case in cases for path in sorted(template[1].glob(case.file))]
    assert targets
    for case in cases:
        for command in (*case.commands, *case.bystanders):
            trial.run(command, "intact", ())
            restore(here, template[1])
    for case, made in targets:
        path = here / made.relative_to(template[1])
        names = (path.name, *case.named)
        for number, damage in enumerate(damages(str(path.relative_to(here)), made.read_bytes(), case.form,
                                                here.parent / "outside", num_files_of(targets, case))):
            restore(here, template[1])
            damage.apply(path)
            about = f"{path.relative_to(here)}, {damage.label}"
            if case.refit is not None and number % 4 != 1 and path.is_file() and not path.is_symlink():
                case.refit(path)
                about += ", checksums fit"
            num_files += 1
            turn, rest = divmod(number, 5 if NUM else 1)
            if case.bystanders and not rest:
                trial.run(case.bystanders[turn % len(case.bystanders)], about + ", elsewhere", ())
            for command in of_turn(case.commands, number):
                trial.run(command, about, names)
    with capsys.disabled():
        if NUM:
            codes = {int(code): num for code, num in sorted(trial.codes.items())}
            print(f"\n{name}: {num_files} files, {trial.num_commands} commands, codes {codes}",
                  *trial.failures, sep="\n  ", flush=True)
    assert not trial.failures, f"{len(trial.failures)} failures\n" + "\n".join(trial.failures)


@dataclass(frozen=True)
class Found:
    """A damage that a command once misread: bytes that are replaced, or, without any, a link instead of the file."""

    file: str
    before: bytes
    after: bytes
    command: Command
    refit: Callable[[Path], None] | None = None
    code: int = ExitCode.BAD_INPUT


CALIBRATION = "share/embark/calibration.toml"
FOUND = (
    Found(CALIBRATION, rb"copy_bytes = .*", b"copy_bytes = 0", SPEC),
    Found(CALIBRATION, rb"fp32 = .*", b"", SPEC),
    Found(CALIBRATION, rb"ids = .*", b"ids = inf", SPEC),
    Found(CALIBRATION, rb"layers = .*", b"layers = 9223372036854775807", SPEC),
    Found(CALIBRATION, rb"memory.pipeline", b"memory.host", SPEC),
    Found("options.toml", rb'"ann"', b"[" * 9_000 + b"]" * 9_000, options),
    Found(f"{LAUNCHED}/submitted.json", rb": .*", b": NaN}", submission),
    Found("data/ids/word.ids.npy", rb"\),", b"(,", LATER, refit_id_map),
    Found(f"{NEW}/index.json", rb"model.dense.bottom.2.weight", b"model.x", ("evaluate", "clicks"), refit_mark),
    Found(f"{NEW}/commit.json", rb'"time_s": [\d.]+', b'"time_s": 9223372036854775808', CHECKPOINTS[0], code=0),
    Found(f"{OLD}/commit.json", rb'(?s)"step": "6".*?"eval": {', b'"step": [], "eval": [1], "x": {', VERSION[1],
          code=0),
    Found("runs/clicks/events.jsonl", b"", b"events.jsonl", TRAIN),
    Found(f"{LAUNCHED}/log", b"", b".", ("logs", "away")),
    Found("model/current.json", b"", b"nothing", ("rollback", "model", "1")),
    Found("model/current.json", rb'"version":\d+', b'"version":4000000000', SCORE),
    Found("model/current.json", rb'"identity":"\w', b'"identity":"-', SCORE),
    Found("model/numbers.json", b"", b"nothing", ("export", "clicks", "--to", "model")),
)


@pytest.mark.parametrize("found", FOUND, ids=lambda found: f"{Path(found.file).name} {found.after[:20]!r}")
def test_a_form_that_was_misread_once_is_read_or_refused(found, here, capsys):
    path = here / found.file
    changed = re.sub(found.before, lambda _: found.after, path.read_bytes(), count=1)
    path.unlink()
    if found.before:
        path.write_bytes(changed)
    else:
        path.symlink_to(found.after.decode())
    if found.refit:
        found.refit(path)
    trial = Trial(capsys)
    trial.run(found.command, found.file, (path.name, "word", *OF_STEP))
    assert not trial.failures, trial.failures
    assert trial.codes == {found.code: 1}
