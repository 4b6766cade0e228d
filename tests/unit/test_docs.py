"""The guides' commands run, in order, as a reader would type them; the example script takes the flags it promises."""

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
SCRIPT = ROOT / "examples" / "cloud_deployment" / "quickstart" / "train_torchrec_quickstart.py"
ENVIRONMENT = {
    **os.environ, "OMP_NUM_THREADS": "1", "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    "PYTHONPATH": str(ROOT / "src"),
}


@pytest.fixture(scope="module")
def embark(tmp_path_factory) -> dict[str, str]:
    """An environment whose `embark` has loaded torch already, and whose `embark-python` runs a script so."""
    with embark_server(tmp_path_factory.mktemp("embark"), ENVIRONMENT, ("embark", "embark-python")) as programs:
        yield {**ENVIRONMENT, "PATH": f"{programs}{os.pathsep}{ENVIRONMENT['PATH']}"}


def shell(command: str, directory: Path, env: dict[str, str] = ENVIRONMENT) -> subprocess.CompletedProcess:
    return subprocess.run(["bash", "-euo", "pipefail", "-c", command], cwd=directory, env=env, text=True,
                          capture_output=True, timeout=240, check=False)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("guide", "expected"),
    [("own-data.md", "Held-out AUC 0.7"), ("data.md", "Held-out AUC 0.8"), ("ranks.md", "step-000000020"),
     ("checkpoints.md", "none damaged"), ("render.md", "nothing found"), ("tpu.md", "fits one v5litepod-8"),
     ("report.md", "wrote both.html"),
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


def test_the_example_script_takes_the_flags_of_torchrec_s_own(tmp_path, embark):
    """Among them those that fail there: `--embedding_dim 256`, and checkpoint flags that are read."""
    done = shell(
        f"embark-python {SCRIPT} --batch_size 64 --embedding_dim 256 --num_epochs 2 --num_batches_per_epoch 3 "
        "--learning_rate 0.01 --num_embeddings_per_feature 50,40,30 --num_dense_features 4 "
        "--over_arch_layer_sizes 16,1 --checkpoint_interval 3 --checkpoint_path kept --enable_spot_recovery",
        tmp_path, embark)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "kept" / "quickstart" / "checkpoints" / "step-000000003" / "commit.json").is_file()
    events = [json.loads(line) for line in (tmp_path / "kept" / "quickstart" / "events.jsonl").read_text().splitlines()]
    assert events[-1]["outcome"] == "done"
    assert events[-1]["step"] == 6


@pytest.mark.parametrize(
    ("flags", "what"),
    [
        ("--dense_arch_layer_sizes 512,256,64 --embedding_dim 128", "ends in 64, but --embedding_dim is 128"),
        ("--over_arch_layer_sizes 512,2", "ends in 2, not in 1"),
        ("--num_embeddings_per_feature 3,x", "not whole numbers"),
        ("--dataset_path gone.parquet", "gone.parquet"),
    ],
)
def test_the_example_script_refuses_what_cannot_be(tmp_path, embark, flags, what):
    done = shell(f"embark-python {SCRIPT} {flags}", tmp_path, embark)
    assert done.returncode == 64
    assert what in done.stderr
    assert "Traceback" not in done.stderr


def test_the_readme_s_verbs_are_those_that_exist():
    from embark.cli.app import app

    named = set(re.findall(r"^\| `embark (\w+)", (ROOT / "README.md").read_text(), re.MULTILINE))
    assert named == {name for name in app if not name.startswith("-")}
