"""Runs a guide's commands as a reader would copy them: every ```bash block, in order, in an account. A block ends with
the code that a comment in it names, and prints what a ```text block right behind it has, where … is any text."""

from __future__ import annotations

import re
import shlex
import shutil
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil
from account_faults import Fault, ask_for, pending
from limits import HANG_S

from cloudsim.account import AccountReport
from cloudsim.session import NEVER_ENDED, AccountSession

REPOSITORY = Path(__file__).parents[3]
_BLOCK = re.compile(r"^(?P<indent> *)```bash\n(?P<text>.*?)^ *```$(\n+ *```text\n(?P<printed>.*?)^ *```$)?",
                    re.MULTILINE | re.DOTALL)
_CODE = re.compile(r"# ends with code (\d+)$", re.MULTILINE)
NOT_IN_BLOCKS = (
    ("commands in tables and sentences", "alternatives and remedies; a walk runs the blocks, in their order"),
    ("embark launch on VMs and TPU VMs", "needs machines that ssh reaches: tests/integration/cloud/test_ssh_backend.py "
                                         "and test_vm_aws.py"),
    ("embark launch on Vertex AI", "speaks Google's REST API: tests/integration/cloud/test_vertex_backend.py"),
)
SECOND_DAY: dict[str, Sequence[Fault]] = {
    "A machine is lost": [("machine lost", "kubectl logs")],
    "A login expires": [("login expired", "kubectl logs")],
    "A disk is full, or a version past its date": [("volume full", ""), ("old cluster", "")],
}
"""What happens in the account while a reader follows a section: nobody types that."""
GPU_MACHINES = re.compile(r"p4d|gpu(?!s\b)")
"""In the names of the guides' paid machines with GPUs."""
RAY_HAS_RUN = re.compile(
    r"^\[pod/dlrm-submitter-0/ray-job-submitter\] \(RayTrainWorker .*/dlrm is finished: 4 steps", re.MULTILINE)
"""In the log of the driver, which a real Ray cluster ran: the run that the guide's first job has trained is left alone.
"""


class WarmSession(AccountSession):
    """A session whose pods are forked by `python`, the value of the fixture `warm_ray_python`."""

    def __init__(self, cloud: str, folder: Path, python: str) -> None:
        self.server = (str(REPOSITORY / "tests" / "support" / "warm_python.py"), python)
        super().__init__(cloud, folder)
        self.folder = folder
        self._until_s = time.monotonic() + HANG_S

    def bash(self, text: str, folder: Path, *, output: int | None = subprocess.PIPE, timeout_s: float = HANG_S
             ) -> subprocess.CompletedProcess[str]:
        """Run lines until all that this session may take is over, and then add what the account does meanwhile."""
        left_s = max(1.0, self._until_s - time.monotonic())
        done = super().bash(text, folder, output=output, timeout_s=min(timeout_s, left_s))
        if done.returncode == NEVER_ENDED:
            started = "".join(f"{one.info['pid']} {shlex.join(one.info['cmdline'] or ())[:400]}\n" for one in
                              psutil.process_iter(["pid", "cmdline", "environ"])
                              if str(self.folder) in str(one.info["environ"]))
            log = self.folder / "server.log"
            size = log.stat().st_size
            self._process.send_signal(signal.SIGUSR1)
            until_s = time.monotonic() + 10.0
            while log.stat().st_size == size and time.monotonic() < until_s:
                time.sleep(0.1)
            done.stdout += f"--- processes of the account\n{started}--- its server\n{log.read_text()[-6000:]}"
        return done


@dataclass(frozen=True)
class Block:
    """Lines of a guide that a reader copies together."""

    text: str
    line: int
    section: str
    printed: tuple[str, ...] = ()

    @property
    def code(self) -> int:
        found = _CODE.search(self.text)
        return int(found[1]) if found else 0

    def missing_in(self, output: str) -> list[str]:
        """Return what the guide says is printed, and is not."""
        return [line for line in self.printed if not re.search(re.escape(line).replace("…", ".*"), output)]


@dataclass
class Walk:
    """What a guide ran, printed and left out."""

    ran: list[Block] = field(default_factory=list)
    commands: list[str] = field(default_factory=list)  # The first line of each command that ran.
    skipped: list[tuple[str, str]] = field(default_factory=list)  # Pairs of command and reason.
    output: str = ""
    report: AccountReport | None = None

    def coverage(self) -> str:
        """Return which commands ran with a real program, which with a stand-in, and which not at all and why."""
        assert self.report is not None
        counts: dict[tuple[str, str], int] = {}
        for one in self.report.records:
            counts[(one.answered_by, one.program)] = counts.get((one.answered_by, one.program), 0) + 1
        return "\n".join([
            "Commands of the guide that ran; bash, embark and python are the real ones:",
            *(f"  {command}" for command in self.commands),
            "Programs that they and their scripts started, by how often:",
            *(f"  {by}: {program} {count}" for (by, program), count in sorted(counts.items())),
            "Not run:",
            *(f"  {command} ({why})" for command, why in [*self.skipped, *NOT_IN_BLOCKS]),
            "Not modelled by the account:",
            *(f"  {line}" for line in self.report.not_modelled)])


def read_guide(path: Path) -> list[Block]:
    text = path.read_text(encoding="utf-8")
    blocks = []
    for match in _BLOCK.finditer(text):
        indent = len(match["indent"])
        lines = "\n".join(line[indent:] for line in match["text"].splitlines())
        heads = re.findall(r"^#+ (.+)$", text[:match.start()], re.MULTILINE)
        printed = tuple(filter(None, map(str.strip, (match["printed"] or "").splitlines())))
        blocks.append(Block(lines, text[:match.start()].count("\n") + 2, heads[-1] if heads else "", printed))
    return blocks


def copy_of_clone(target: Path) -> Path:
    """Copy what a fresh clone has: the files that git knows, and nothing built."""
    names = subprocess.run(["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "examples"],
                           cwd=REPOSITORY, capture_output=True, text=True, check=True).stdout.split("\0")
    for name in filter(None, names):
        path = target / name
        if (REPOSITORY / name).is_file():
            path.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(REPOSITORY / name, path)
    return target


SKIPS = {
    "pip install": "the package under test is installed already",
    "tensorboard": "does not end",
}
SCORE = re.compile(r'\{"version":1,"scores":\[\d[\d.e-]*\],"errors":\[\]\}')
"""The server's answer to the guide's request."""


def walk(session: WarmSession, blocks: Sequence[Block], folder: Path, *, skips: Mapping[str, str] = SKIPS,
         sections: Sequence[str] = (), faults: Mapping[str, Sequence[Fault]] | None = None) -> Walk:
    """Run the blocks in order, and nothing else. `skips` maps the beginning of each command that cannot run here to the
    reason, and each must occur; `faults` are those of sections, and each must happen."""
    walked = Walk()
    unused = dict(skips)
    coming = dict(faults or {})
    for block in blocks:
        if sections and block.section not in sections:
            continue
        kept = []
        for command in _commands(block.text):
            prefix = next((one for one in skips if command.startswith(one)), None)
            if prefix is None:
                kept.append(command)
            else:
                unused.pop(prefix, None)
                walked.skipped.append((command.splitlines()[0], skips[prefix]))
        if not kept:
            continue
        if block.section in coming:
            assert not pending(session.folder), "what was to happen before has not"
            ask_for(session.folder, coming.pop(block.section))
        done = session.bash("\n".join(kept), folder)
        if re.search(r"\./train_\w+\.sh --yes", block.text) and "The GPU machines are paid until" not in done.stdout:
            left = [one for one in session.report().paid if GPU_MACHINES.search(one)]
            assert not left, f"line {block.line} ({block.section}) left {left} and does not say so"
        walked.commands += [command.splitlines()[0] for command in kept]
        walked.output += done.stdout
        walked.ran.append(block)
        assert (done.returncode, block.missing_in(done.stdout)) == (block.code, []), (
            f"line {block.line} ({block.section}) ended with {done.returncode}:\n"
            f"{block.text}\n--- output\n{done.stdout[-20_000:]}")
    assert not coming, f"these sections are not in the guide any more: {sorted(coming)}"
    assert not pending(session.folder), "this did not happen"
    assert not unused, f"these commands are not in the guide any more: {sorted(unused)}"
    walked.report = session.report()
    return walked


def _commands(text: str) -> list[str]:
    """Return one command for each line, with the lines that continue it."""
    commands: list[str] = []
    is_open = False
    for line in text.splitlines():
        if is_open and commands:
            commands[-1] += f"\n{line}"
        elif line.strip():
            commands.append(line)
        is_open = line.endswith("\\") or (bool(commands) and commands[-1].count("'") % 2 == 1)
    return commands
