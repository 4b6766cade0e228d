"""The guides' commands run, in order, as a reader would type them."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from embark_server import embark_server

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"^```(\w+) (run|file=(\S+))\n(.*?)^```$", re.MULTILINE | re.DOTALL)
ENVIRONMENT = {
    **os.environ, "OMP_NUM_THREADS": "1", "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    "PYTHONPATH": str(ROOT / "src"),
}


@pytest.fixture(scope="module")
def embark(tmp_path_factory) -> dict[str, str]:
    """An environment whose `embark` has loaded torch already."""
    with embark_server(tmp_path_factory.mktemp("embark"), ENVIRONMENT) as programs:
        yield {**ENVIRONMENT, "PATH": f"{programs}{os.pathsep}{ENVIRONMENT['PATH']}"}


def shell(command: str, directory: Path, env: dict[str, str] = ENVIRONMENT) -> subprocess.CompletedProcess:
    return subprocess.run(["bash", "-euo", "pipefail", "-c", command], cwd=directory, env=env, text=True,
                          capture_output=True, timeout=240, check=False)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("guide", "expected"),
    [("own-data.md", "Held-out AUC 0.7"), ("data.md", "Held-out AUC 0.8"), ("ranks.md", "step-000000020"),
     ("checkpoints.md", "none damaged"), ("render.md", "nothing found"), ("tpu.md", "fits one v5litepod-8"),
     ("report.md", "wrote both.html"), ("evaluate.md", "by Student's t"),
     ("cost.md", "of its budget of")],
)
def test_a_guide_s_commands_run(tmp_path, embark, guide, expected):
    output = ""
    blocks = BLOCK.findall((ROOT / "docs" / guide).read_text())
    assert len(blocks) >= 3
    for _language, kind, name, text in blocks:
        if kind == "run":
            done = shell(text, tmp_path, embark)
            assert done.returncode == 0, f"{text}\n{done.stdout}{done.stderr}"
            output += done.stdout
        else:
            (tmp_path / name).write_text(text)
    assert expected in output
    if "Held-out AUC" in expected:  # examples of training: a model worse than the mean teaches nothing
        assert all(last_eval(run)["normalized_entropy"] < 1 for run in tmp_path.rglob("events.jsonl"))


def last_eval(events: Path) -> dict[str, float]:
    return [event for line in events.read_text().splitlines() if (event := json.loads(line))["event"] == "eval"][-1]


def test_the_readme_s_verbs_are_those_that_exist():
    from embark.cli.app import app

    named = set(re.findall(r"^\| `embark (\w+)", (ROOT / "README.md").read_text(), re.MULTILINE))
    assert named == {name for name in app if not name.startswith("-")}
