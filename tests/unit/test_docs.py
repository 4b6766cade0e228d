"""The guides' commands run, in order, as a reader would type them."""

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from limits import HANG_S

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"^```(\w+) (run|file=(\S+))\n(.*?)^```$", re.MULTILINE | re.DOTALL)
EXAMPLE = re.compile(r"\]\((?:\.\./)+examples/(\w+\.py)\)")
ENVIRONMENT = {
    **os.environ, "OMP_NUM_THREADS": "1", "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    "PYTHONPATH": str(ROOT / "src"),
}


@pytest.fixture(scope="module")
def embark(tmp_path_factory, warm_python) -> dict[str, str]:
    """An environment whose `embark` and `torchrun` have loaded torch already."""
    programs = tmp_path_factory.mktemp("programs")
    for name, module in (("embark", "embark"), ("torchrun", "torch.distributed.run")):
        (programs / name).write_text(f'#!/bin/sh\nexec {warm_python} -m {module} "$@"\n')
        (programs / name).chmod(0o755)
    return {**ENVIRONMENT, "PATH": f"{programs}{os.pathsep}{ENVIRONMENT['PATH']}"}


def shell(command: str, directory: Path, env: dict[str, str] = ENVIRONMENT) -> subprocess.CompletedProcess:
    return subprocess.run(["bash", "-euo", "pipefail", "-c", command], cwd=directory, env=env, text=True,
                          capture_output=True, timeout=HANG_S, check=False)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("guide", "expected"),
    [
        ("start/custom-data.md", "Held-out AUC 0.7"),
        ("start/data.md", "best      AUC 0.8"),
        ("start/ranks.md", "step-000000020"),
        ("guides/checkpoints.md", "none damaged"),
        ("guides/render.md", "nothing found"),
        ("guides/tpu.md", "fits one v5litepod-8"),
        ("guides/report.md", "wrote both.html"),
        ("guides/evaluate.md", "by Student's t"),
        ("guides/export.md", "1,000 scores by version 1"),
        ("guides/publish.md", "passes the gate"),
        ("guides/retrieval.md", "Recall@20"),
        ("guides/models.md", "fits one g6.xlarge"),
        ("guides/tasks.md", "10 scores by version 1"),
        ("guides/cost.md", "of its budget of"),
        ("guides/sequences.md", "Hit@10"),
        ("guides/follow.md", "Trained to step 120"),
        ("guides/fresh-deployment.md", "nothing found"),
        ("guides/tune.md", "best held-out AUC 0.7"),
        ("guides/dynamic-tables.md", "2 scores by version 1"),
        ("internals/scaling.md", "bound by all-to-all"),
    ],
)
def test_a_guide_s_commands_run(tmp_path, embark, guide, expected):
    output, text = "", (ROOT / "docs" / guide).read_text()
    for example in set(EXAMPLE.findall(text)):  # which a reader puts beside the spec
        shutil.copy(ROOT / "examples" / example, tmp_path)
    blocks = BLOCK.findall(text)
    assert len(blocks) >= 2
    for _language, kind, name, text in blocks:
        if kind == "run":
            done = shell(text, tmp_path, embark)
            assert done.returncode == 0, f"{text}\n{done.stdout}{done.stderr}"
            output += done.stdout
        else:
            (tmp_path / name).write_text(text)
    assert expected in output
    ends = {run.parent.name: last_entropy(run) for run in tmp_path.rglob("events.jsonl")
            if not run.parent.name.startswith("trial-")}  # a search tries bad settings too
    assert all(entropy < 1 for entropy in ends.values()), ends  # a model worse than the mean teaches nothing


def last_entropy(events: Path) -> float:
    """The held-out normalized entropy a run ended with; 0 where it was stopped before it evaluated."""
    lines = map(json.loads, events.read_text().splitlines())
    return [0.0, *(line.get("normalized_entropy", 0.0) for line in lines
                   if line["event"] == "eval" and "hit_at_k" not in line)][-1]


GUIDES = sorted(path for path in (ROOT / "README.md", *(ROOT / "docs").rglob("*.md"),
                                  *(ROOT / "examples" / "cloud_deployment").rglob("README.md")))


@pytest.mark.parametrize("guide", GUIDES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_guide_shows_no_model_worse_than_the_mean(guide):
    shown = [float(value) for value in re.findall(r"\bNE (\d\.\d+)", guide.read_text())]
    assert all(value < 1 for value in shown), shown
    assert shown or guide.name != "README.md" or guide.parent != ROOT


def test_readme_names_ten_commands_and_all_exist():
    from embark.cli.app import COMMANDS

    named = re.findall(r"^\| `embark ([\w ]+)`", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert len(named) == 10
    assert set(named) <= {name for commands in COMMANDS.values() for name in commands}


def test_page_of_commands_is_made_from_the_command_line():
    spec = importlib.util.spec_from_file_location("make_commands", ROOT / "tools" / "make_commands.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert (ROOT / "docs" / "reference" / "commands.md").read_text() == module.page(), "make docs"


LINK = re.compile(r"\]\((?!https?://|mailto:|#)([^)\s#]+)")


@pytest.mark.parametrize("guide", GUIDES, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_between_documents_lead_to_files_that_exist(guide):
    missing = [target for target in LINK.findall(guide.read_text()) if not (guide.parent / target).exists()]
    assert not missing
