"""Nothing in the tree belongs to one person's machine, and nothing is left for later."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from limits import HANG_S

ROOT = Path(__file__).parents[2]

FORBIDDEN = {
    "a path of one machine": re.compile(r"(?<![\w.~*$}-])/(?:home|Users|root|work)/(?!kubernetes/bin)[\w.]"),
    "where one machine's pip looks": re.compile(
        r"(?i)(?:index[-_]url|find[-_]links|trusted[-_]host)[\s=:\"']+(?:https?:|file:|/)"
    ),
    "a task left for later": re.compile(r"\b(?:TO" + r"DO|FIX" + r"ME|XX" + r"X)\b"),
}


def test_no_file_holds_a_word_that_must_not_be_there():
    found = [f"{path.relative_to(ROOT)}:{line}" for path in tree() for line in offences(read(path))]
    assert not found


@pytest.mark.parametrize(
    ("text", "is_offence"),
    [
        ("see /ho" + "me/ann/x", True),
        ("path: '/ro" + "ot/.cache'", True),
        ("--index" + "-url https://example.com", True),
        ("PIP_FIND" + "_LINKS=/wheels", True),
        ("# TO" + "DO: later", True),
        ("https://example.com/home/x", False),
        ("src/work/x and $HOME/x and ~/work/x", False),
        ("--index-url, --find-links", False),
    ],
)
def test_the_search_tells_such_words_from_others(text: str, is_offence: bool):
    assert bool(offences(text)) == is_offence


def offences(text: str) -> list[str]:
    return [
        f"{number}: {what}: {match.group()}"
        for what, pattern in FORBIDDEN.items()
        if pattern.search(text)
        for number, line in enumerate(text.splitlines(), 1)
        if (match := pattern.search(line))
    ]


def tree() -> list[Path]:
    """What git has or would take; in an unpacked archive, which has no git, every file outside hidden folders."""
    if shutil.which("git") and (ROOT / ".git").exists():
        # git takes another user's checkout for "dubious", and then lists nothing
        command = ["git", "-c", f"safe.directory={ROOT}", "ls-files", "-z", "-co", "--exclude-standard"]
        listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=HANG_S).stdout
        files = [ROOT / name for name in listed.split("\0") if name]
    else:
        folders = [path for path in ROOT.iterdir() if path.is_dir() and not path.name.startswith(".")]
        files = [path for folder in folders for path in folder.rglob("*")]
    found = [path for path in files if path.is_file() and path.suffix not in (".pyc", ".png")]
    assert len(found) > 20
    return found


def read(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace")
