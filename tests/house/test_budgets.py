"""The size of the product is a budget, counted in tokens, and the limits may only fall."""

from __future__ import annotations

import tokenize
from collections import Counter
from io import BytesIO
from pathlib import Path

from embark.cli.app import COMMANDS

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "embark"
SIMULATOR = ROOT / "cloudsim" / "src"

TOTAL = 700_000
CLOUDSIM = 95_000
PACKAGES = {
    ("trainers",): 141_854, ("data", "features"): 138_960, ("rehearse",): 26_600, ("launch",): 43_450,
    ("plan",): 35_590, ("lint",): 32_969, ("kubernetes",): 10_285, ("serve",): 31_500, ("render",): 28_742,
    ("events",): 27_170, ("cli",): 23_869, ("run",): 26_056, ("report", "dashboard"): 32_812, ("store",): 19_952,
    ("spec",): 22_300,
    ("export", "publish"): 21_500, ("diagnose", "doctor"): 19_656, ("model", "catalog"): 17_651, ("tuning",): 4_768,
}
"""Packages that share a limit, in tokens. A package that needs more takes it from another one: TOTAL does not move."""
MAX_SMALL_MODULES = 20
MAX_COMMANDS = 36

COUNTED = {tokenize.NAME, tokenize.OP, tokenize.NUMBER, tokenize.STRING}


def num_tokens(source: bytes) -> int:
    """Count what a reader has to read: no comments, no white space. An f-string is one token, as Python 3.11 has it;
    later ones take it apart."""
    num = depth = 0
    for token in tokenize.tokenize(BytesIO(source).readline):
        kind = tokenize.tok_name[token.type]
        depth -= kind == "FSTRING_END"
        num += not depth and (token.type in COUNTED or kind == "FSTRING_END")
        depth += kind == "FSTRING_START"
    return num


def tokens_below(folder: Path) -> Counter[str]:
    """Count the tokens of each first folder below `folder`."""
    sizes: Counter[str] = Counter()
    for path in folder.rglob("*.py"):
        sizes[path.relative_to(folder).parts[0]] += num_tokens(path.read_bytes())
    return sizes


def test_tokens_are_counted_without_comments_and_white_space():
    assert num_tokens(b"x = 1  # one\n\n\n\ndef f():\n    return 'a b'\n") == 10
    assert num_tokens(b"x = f'{y!r:{width}} {f(1, f\"{z}\")}' + f'a'\n") == 5


def test_the_product_and_its_packages_keep_their_budgets():
    sizes = tokens_below(PACKAGE)
    assert sum(sizes.values()) <= TOTAL
    over = {names: size for names, limit in PACKAGES.items() if (size := sum(sizes[name] for name in names)) > limit}
    assert not over, "make it smaller, or take the difference from another package's limit"


def test_the_simulated_accounts_keep_their_budget():
    assert 0 < sum(tokens_below(SIMULATOR).values()) <= CLOUDSIM


def test_few_modules_are_splinters():
    small = sorted(str(path.relative_to(PACKAGE)) for path in PACKAGE.rglob("*.py")
                   if path.name != "__init__.py" and len(path.read_text().splitlines()) < 50)
    assert len(small) <= MAX_SMALL_MODULES, small


def test_there_are_few_commands():
    assert sum(map(len, COMMANDS.values())) <= MAX_COMMANDS
