"""The examples are whole: every file that was promised, links that lead somewhere, the catalog's numbers."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml
from limits import HANG_S

from embark.catalog.load import clear_cache
from embark.render.folder import File
from embark.spec import RunSpec

PROMISED = (
    "README.md", "quickstart/README.md", "quickstart/train_torchrec_quickstart.py", "quickstart/Dockerfile",
    "quickstart/kubernetes_job.yaml", "quickstart/requirements.txt", "aws/README.md", "aws/eks_cluster.yaml",
    "aws/cloud_component.py", "aws/train_dlrm_aws.sh", "aws/kubernetes_job.yaml", "azure/README.md",
    "azure/aks_cluster.yaml", "azure/cloud_component.py", "azure/train_dlrm_azure.sh", "azure/kubernetes_job.yaml",
    "gcp/README.md", "gcp/gke_cluster.yaml", "gcp/cloud_component.py", "gcp/train_dlrm_gcp.sh",
    "gcp/kubernetes_job.yaml",
)
EXAMPLES = Path(__file__).parents[3] / "examples" / "cloud_deployment"
sys.path.insert(0, str(EXAMPLES.parent))
from make_examples import cloud_job, example_tree, quickstart_script, requirements  # noqa: E402

BASH = re.compile(r"^( *)```bash\n(.*?)^ *```", re.M | re.S)


@pytest.fixture(scope="module")
def tree() -> dict[str, File]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_DATA_HOME", "/nonexistent")  # not the prices that someone took in here
        clear_cache()
        found = example_tree()
    clear_cache()
    return {file.path: file for file in found}


def test_every_promised_file_is_there(tree):
    assert not [path for path in PROMISED if path not in tree]


def test_no_path_stands_twice(tree):
    assert len(example_tree()) == len(tree)


def test_every_file_is_what_its_name_says(tree):
    for path, file in tree.items():
        if path.endswith(".yaml"):
            assert list(yaml.safe_load_all(file.text)), path
        elif path.endswith(".json"):
            json.loads(file.text)
        elif path.endswith(".py"):
            ast.parse(file.text)
        elif path.endswith(".toml"):
            tomllib.loads(file.text)
        assert file.text.endswith("\n"), path
        assert not re.search(r"[ \t]$", file.text, re.M) or path.endswith(".md"), path


@pytest.mark.parametrize("cloud", ["aws", "azure", "gcp"])
def test_the_spec_beside_the_files_is_the_one_they_were_made_of(tree, cloud: str):
    written = RunSpec.model_validate_json(json.dumps(tomllib.loads(tree[f"{cloud}/run.toml"].text)))
    assert written == cloud_job(cloud).spec


def test_every_link_within_the_tree_leads_somewhere(tree):
    wrong = []
    for path, file in tree.items():
        if not path.endswith(".md"):
            continue
        headings = {re.sub(r"[^a-z0-9 -]", "", h.lower()).replace(" ", "-")
                    for h in re.findall(r"^#+ (.*)$", file.text, re.M)}
        for target in re.findall(r"\]\(([^)]+)\)", file.text):
            if target.startswith("http"):
                continue
            if target.startswith("#"):
                wrong += [] if target[1:] in headings else [(path, target)]
            elif os.path.normpath(os.path.join(os.path.dirname(path), target)) not in tree:
                wrong.append((path, target))
    assert not wrong


def test_every_script_that_a_guide_names_is_beside_it(tree):
    for path in ("aws/README.md", "azure/README.md", "gcp/README.md"):
        named = set(re.findall(r"(?<![\w/])\./([\w.]+\.sh)", tree[path].text))
        assert len(named) >= 4
        assert not [name for name in named if f"{path.split('/')[0]}/{name}" not in tree], path


def test_commands_of_the_guides_are_sound_shell(tree):
    num_blocks = 0
    for path, file in tree.items():
        for indent, block in BASH.findall(file.text) if path.endswith(".md") else ():
            num_blocks += 1
            text = "\n".join(line.removeprefix(indent) for line in block.splitlines())
            done = subprocess.run(["bash", "-n"], input=text, capture_output=True, text=True, timeout=HANG_S)
            assert done.returncode == 0, (path, text, done.stderr)
    assert num_blocks > 40


def test_the_guides_tell_the_catalog_s_prices_and_none_of_the_old_ones(tree):
    text = tree["aws/README.md"].text
    assert "$43.92" in text, "two p4d.24xlarge on demand in us-west-2"
    assert "~$" not in "".join(file.text for file in tree.values())


def test_the_azure_guide_is_as_full_as_the_others(tree):
    sizes = {cloud: len(tree[f"{cloud}/README.md"].text) for cloud in ("aws", "azure", "gcp")}
    assert sizes["azure"] > 0.9 * min(sizes["aws"], sizes["gcp"])


def test_nothing_of_older_guides_that_does_not_work_is_reported(tree):
    message = "\n".join(file.text for path, file in tree.items() if path != "gcp/README.md")
    for wrong in ("gsutil", "pip install google-cloud-sdk", "weaveworks/eksctl", "HIGH_SCALE_SSD", "$(MASTER_ADDR)",
                  "FI_PROVIDER=efa", "roles/ml.developer", "pytorch:2.1.0", "tpu-vm-pt"):
        assert wrong not in message, wrong


def test_requirements_are_the_matched_versions():
    lines = [line for line in requirements().splitlines() if not line.startswith("#")]
    assert {"torch==2.13.0", "torchrec==1.8.0", "fbgemm-gpu==1.8.0"} <= set(lines)


def test_the_quickstart_s_script_is_clean(tmp_path: Path):
    script = tmp_path / "train_torchrec_quickstart.py"
    script.write_text(quickstart_script())
    done = subprocess.run([sys.executable, "-m", "ruff", "check", "--no-cache", "--isolated", "--line-length=120",
                           "--select=E,F,W,I,B,UP", script], capture_output=True, text=True, timeout=HANG_S)
    assert done.returncode == 0, done.stdout


def test_the_examples_in_the_repository_are_a_fresh_rendering(tree):
    """`make examples` writes them."""
    there = {str(path.relative_to(EXAMPLES)): path for path in EXAMPLES.rglob("*") if path.is_file()}
    there = {name: path for name, path in there.items() if "__pycache__" not in name and not name.endswith(".whl")}
    assert sorted(there) == sorted(tree)
    for name, path in there.items():
        assert path.read_text() == tree[name].text, name
        assert os.access(path, os.X_OK) == tree[name].is_executable, name
