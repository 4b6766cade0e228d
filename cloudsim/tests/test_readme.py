"""README.md says what is modelled and what is not."""

from pathlib import Path

from cloudsim.azure.program import ANSWERS
from cloudsim.gcp.gcloud import HANDLERS
from cloudsim.kubernetes.kinds import builtin_kinds
from cloudsim.state import load_facts

TEXT = (Path(__file__).parents[1] / "README.md").read_text()


def test_the_readme_lists_what_no_account_models():
    lines = [line for lines in load_facts("not_modelled.toml").values() for line in lines]
    rows = [f"| {cloud} | {text} |" for cloud, _, text in (line.partition(": ") for line in lines)]
    assert not [row for row in rows if row not in TEXT]


def test_the_readme_counts_the_commands_and_kinds():
    assert f"| `az` | {len(ANSWERS)} commands" in TEXT
    assert f"| `gcloud`, `gsutil` | {len(HANDLERS)} commands" in TEXT
    assert f"{len(builtin_kinds())} built-in kinds" in TEXT
