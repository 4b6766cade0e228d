"""One run.toml per folder: every file follows from it, and what is set once stays set."""

from __future__ import annotations

import base64
import json
import re
import shlex
import shutil
import tomllib
from pathlib import Path

import pytest
import yaml

from embark.__main__ import run
from embark.catalog.load import clear_cache
from embark.errors import ExitCode
from embark.spec import load_spec, resolve

EXAMPLES = Path(__file__).parents[3] / "examples" / "cloud_deployment"
CLOUDS = ("aws", "azure", "gcp")
IMAGE = "registry.acme.dev/embark:7"
MANIFESTS = ("kubernetes_job.yaml", "jobset.yaml", "trainjob.yaml", "pytorchjob.yaml", "rayjob.yaml", "raycluster.yaml",
             "cloud_component.py")
AWS = ["--set", "place.cloud=aws", "--set", "store.root=s3://bucket/runs"]


@pytest.fixture(autouse=True)
def _catalog(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("XDG_DATA_HOME", "/nonexistent")  # not the prices that someone took in here
    clear_cache()
    yield
    clear_cache()


def copy_of(folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The committed folder, as the working directory."""
    copy = tmp_path / folder
    shutil.copytree(EXAMPLES / folder, copy)
    monkeypatch.chdir(copy)
    return copy


def render(*words: str) -> int:
    return run(["render", *words])


def texts(folder: Path) -> dict[str, str]:
    """Without Embark's wheel, which is packed anew where the code has changed, and not committed."""
    return {path.relative_to(folder).as_posix(): path.read_text() for path in folder.rglob("*")
            if path.is_file() and path.suffix != ".whl"}


@pytest.mark.parametrize("folder", [*CLOUDS, "quickstart"])
def test_a_fresh_copy_of_the_committed_folder_renders_as_it_is(folder: str, tmp_path: Path, monkeypatch, capsys):
    copy = copy_of(folder, tmp_path, monkeypatch)
    before = texts(copy)
    assert render("run.toml") == 0
    assert "edited" not in capsys.readouterr().out
    assert texts(copy) == before
    assert render("run.toml", "--diff") == 0
    assert ". is up to date" in capsys.readouterr().out


@pytest.mark.parametrize("cloud", CLOUDS)
def test_settings_stay_and_reach_every_file_of_every_target(cloud: str, tmp_path: Path, monkeypatch, capsys):
    folder = copy_of(cloud, tmp_path, monkeypatch)
    assert render("run.toml", "--set", f"place.image={IMAGE}") == 0
    assert render("run.toml", "--set", "place.nodes=4", "--set", "place.spot=true") == 0
    said = capsys.readouterr().out
    assert f'wrote place.image = "{IMAGE}" to run.toml' in said
    assert "wrote place.nodes = 4 to run.toml" in said
    assert "edited" not in said
    found = {path: text for path, text in texts(folder).items() if path != "README.md"}
    assert not [path for path, text in found.items() if "registry.example.com" in text]
    assert not [path for path, text in found.items()
                if re.search(r"\bnodes = 2\b|nnodes=2\b|NUM_NODES = 2\b|NUM_MACHINES = 2\b|\b2 x [a-zA-Z]", text)]
    for path in MANIFESTS:
        assert IMAGE in found[path], path
        assert "spot = true" in found[path] or "spot = true" in decoded_spec(found[path]), path
    spec = load_spec("run.toml")
    assert (spec.place.nodes, spec.place.spot, spec.place.image) == (4, True, IMAGE)
    assert num_pods(found) == dict.fromkeys(("job", "jobset", "trainjob", "pytorchjob", "ray"), 4)
    # From nothing, the same spec gives the same files: nothing of an earlier rendering is left.
    fresh = tmp_path / "fresh"
    fresh.mkdir()
    shutil.copy("run.toml", fresh)
    assert render(str(fresh / "run.toml"), "--out", str(fresh)) == 0
    assert texts(fresh) == found


def decoded_spec(text: str) -> str:
    """Of a file that carries it in a variable."""
    literals = re.search(r"'EMBARK_SPEC\w*': ((?:\(?\s*'[\w+/=]+'\s*)+)", text)
    assert literals
    return base64.b64decode("".join(re.findall(r"'([^']+)'", literals[1]))).decode()


def num_pods(found: dict[str, str]) -> dict[str, int]:
    def of_kind(path: str, kind: str) -> dict:
        return next(one["spec"] for one in yaml.safe_load_all(found[path]) if one["kind"] == kind)

    return {
        "job": of_kind("kubernetes_job.yaml", "Job")["completions"],
        "jobset": of_kind("jobset.yaml", "JobSet")["replicatedJobs"][0]["template"]["spec"]["completions"],
        "trainjob": of_kind("trainjob.yaml", "TrainJob")["trainer"]["numNodes"],
        "pytorchjob": sum(one["replicas"] for one in of_kind("pytorchjob.yaml", "PyTorchJob")["pytorchReplicaSpecs"]
                          .values()),
        "ray": of_kind("rayjob.yaml", "RayJob")["rayClusterSpec"]["workerGroupSpecs"][0]["replicas"],
    }


def test_another_target_of_the_folder_is_launched_and_all_stay_rendered(tmp_path: Path, monkeypatch):
    folder = copy_of("aws", tmp_path, monkeypatch)
    before = set(texts(folder))
    assert render("run.toml", "--target", "jobset", "--set", "place.nodes=4") == 0
    assert set(texts(folder)) == before
    assert set(num_pods(texts(folder)).values()) == {4}
    assert "jobset.yaml" in (folder / "train_dlrm_aws.sh").read_text()


def test_an_edit_of_run_toml_by_hand_is_rendered(tmp_path: Path, monkeypatch):
    folder = copy_of("aws", tmp_path, monkeypatch)
    path = folder / "run.toml"
    path.write_text("# mine\n" + path.read_text().replace("nodes = 2", "nodes = 8"))
    assert render("run.toml") == 0
    assert set(num_pods(texts(folder)).values()) == {8}
    assert path.read_text().startswith("# mine\n")


def test_diff_writes_nothing(tmp_path: Path, monkeypatch, capsys):
    folder = copy_of("aws", tmp_path, monkeypatch)
    before = texts(folder)
    assert render("run.toml", "--set", "place.nodes=4", "--diff") == 1
    assert "+nodes = 4" in capsys.readouterr().out
    assert texts(folder) == before


def test_a_refused_setting_writes_nothing(tmp_path: Path, monkeypatch):
    folder = copy_of("aws", tmp_path, monkeypatch)
    before = texts(folder)
    assert render("run.toml", "--set", "place.nodes=4", "--set", "place.machine=p4d.25xlarge") == ExitCode.BAD_INPUT
    assert texts(folder) == before


@pytest.mark.parametrize(("cloud", "root", "more"), [
    ("aws", "s3://mine/runs", []), ("azure", "az://mine/runs", ["--set", "place.storage_account=mine"]),
    ("gcp", "gs://mine/runs", []),
])
def test_the_quickstart_renders_for_every_cloud(cloud: str, root: str, more: list[str], tmp_path: Path, monkeypatch):
    folder = copy_of("quickstart", tmp_path, monkeypatch)
    before = set(texts(folder))
    sets = ["--set", f"place.cloud={cloud}", "--set", f"store.root={root}", "--set", f"place.image={IMAGE}", *more]
    assert render("run.toml", *sets) == 0
    assert render("run.toml", "--set", "place.nodes=4") == 0
    found = texts(folder)
    assert set(found) == before
    assert "registry.example.com" not in found["kubernetes_job.yaml"]
    assert 'COPY ["train_torchrec_quickstart.py", "./train_torchrec_quickstart.py"]' in found["Dockerfile"]
    assert "!train_torchrec_quickstart.py" in found[".dockerignore"].splitlines()
    (selector,) = set(re.findall(r"--selector (\S+)=(\S+?)`? ", found["README.md"]))
    pods = [one["spec"]["template"]["metadata"]["labels"] for one in yaml.safe_load_all(found["kubernetes_job.yaml"])
            if one["kind"] == "Job"]
    assert [labels[selector[0]] for labels in pods] == [selector[1]]


BASH = re.compile(r"^( *)```bash\n(.*?)^ *```", re.M | re.S)


@pytest.mark.parametrize("folder", ["gcp", "quickstart"])  # tests/integration/account walks all guides
def test_the_guide_s_own_commands_work_in_the_order_given(folder: str, tmp_path: Path, monkeypatch, capsys):
    copy = copy_of(folder, tmp_path, monkeypatch)
    guide = (copy / "README.md").read_text()
    for yours, mine in (("YOUR-BUCKET", "my-bucket"), ("CONTAINER", "my-container"), ("$PROJECT", "my-project"),
                        ("$BUCKET", "my-bucket"), ("$REGISTRY", "registry.example.org"),
                        ("$AZURE_STORAGE_ACCOUNT_NAME", "myaccount")):
        guide = guide.replace(yours, mine)
    lines = [line.strip() for _, block in BASH.findall(guide) for line in block.replace("\\\n", "").splitlines()]
    words = [shlex.split(line, comments=True) for line in lines
             if line.startswith(("embark render", "embark lint", "embark plan"))]
    assert len(words) >= 3
    for command in words:
        assert run(command[1:]) == 0, command
    assert "edited" not in capsys.readouterr().out
    spec = load_spec("run.toml")
    set_last = {key: value for command in words if "--out" not in command for key, _, value in
                (word.partition("=") for word in command if re.match(r"[a-z]+\.\w+=", word))}
    assert set_last, "the guide sets something"
    values = {key: getattr(getattr(spec, key.split(".")[0]), key.split(".")[1]) for key in set_last}
    assert {key: (json.dumps(value) if isinstance(value, tuple) else str(value)).lower()
            for key, value in values.items()} == {key: value.lower() for key, value in set_last.items()}
    assert "place.nodes=4" in guide
    assert render("run.toml", "--diff") == 0


def test_a_sub_folder_keeps_its_own_spec(tmp_path: Path, monkeypatch, capsys):
    """As the guides write it: VMs beside the cluster's files."""
    folder = copy_of("gcp", tmp_path, monkeypatch)
    assert render("run.toml", "--set", "place.nodes=4") == 0
    words = ["run.toml", "--set", "place.target=vm", "--set", "place.volume=", "--set",
             "data.path=gs://mine/data/criteo-1tb", "--out", "vm"]
    assert render(*words) == 0
    spec = load_spec("vm/run.toml")
    assert (spec.name, spec.place.target, spec.place.nodes, spec.place.volume) == ("dlrm", "vm", 4, "")
    assert not (folder / "vm/jobset.yaml").exists()
    assert load_spec("run.toml").place.target == "job"
    # The same command takes in what has changed in run.toml.
    assert render("run.toml", "--set", "place.image=registry.acme.dev/embark:7") == 0
    assert render(*words) == 0
    assert load_spec("vm/run.toml").place.image == IMAGE
    # From its first setting on, vm/run.toml is the one to change.
    capsys.readouterr()
    assert render("vm/run.toml", "--set", "place.spot=true") == 0
    assert "wrote place.spot = true to vm/run.toml" in capsys.readouterr().out
    assert load_spec("vm/run.toml").place.spot
    before = texts(folder)
    assert render(*words) == ExitCode.BAD_INPUT
    said = capsys.readouterr().err
    assert "place.spot: true there, false by run.toml" in said
    assert "embark render vm/run.toml --set" in said
    assert texts(folder) == before


def test_a_spec_elsewhere_is_copied_with_its_comments_and_kept_up_to_date(tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("mine.toml").write_text("# my run\n[train]\nbatch_size = 4096  # in all\n")
    assert render("mine.toml", *AWS) == 0
    copy = Path("deploy/mine/run.toml")
    assert copy.read_text().startswith("# my run\n")
    assert "batch_size = 4096  # in all\n" in copy.read_text()
    assert load_spec(str(copy)) == load_spec("mine.toml", AWS[1::2])
    Path("mine.toml").write_text("[train]\nbatch_size = 8192\n")
    assert render("mine.toml", *AWS) == 0
    assert load_spec(str(copy)).train.batch_size == 8192
    assert "batch_size = 8192" in Path("deploy/mine/kubernetes_job.yaml").read_text()


def test_settings_of_a_spec_elsewhere_are_not_lost_silently(tmp_path: Path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("mine.toml").write_text("[place]\nnodes = 2\n")
    assert render("mine.toml", *AWS, "--set", "place.nodes=4") == 0
    before = texts(tmp_path)
    capsys.readouterr()
    assert render("mine.toml", *AWS, "--set", "place.spot=true") == ExitCode.BAD_INPUT
    assert "place.nodes: 4 there, 2 by mine.toml" in capsys.readouterr().err
    assert texts(tmp_path) == before
    assert render("deploy/mine/run.toml", "--set", "place.spot=true") == 0
    assert load_spec("deploy/mine/run.toml").place.nodes == 4


def test_a_preset_is_written_as_a_person_would(tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert render("quickstart", *AWS) == 0
    text = Path("deploy/quickstart/run.toml").read_text()
    assert load_spec("deploy/quickstart/run.toml") == load_spec("quickstart", AWS[1::2])
    assert "timeout_s" not in text, "only what is set"
    assert render("deploy/quickstart/run.toml", "--diff") == 0


def test_a_run_toml_of_somebody_else_is_not_overwritten(tmp_path: Path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("run.toml").write_text("name = 'theirs'\n")
    assert render("quickstart", *AWS, "--out", ".", "--force") == ExitCode.BAD_INPUT
    assert "name: \"theirs\" there, \"quickstart\" by quickstart" in capsys.readouterr().err
    assert texts(tmp_path) == {"run.toml": "name = 'theirs'\n"}


def test_two_specs_in_one_folder_do_not_share_its_rendering(tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("one", "two"):
        Path(f"{name}.toml").write_text('[place]\ncloud = "aws"\n[store]\nroot = "s3://b/r"\n')
    assert render("one.toml", "--out", ".") == 0
    assert render("one.toml", "--set", "place.nodes=2") == 0  # into the folder that it was rendered into
    assert not Path("deploy").exists()
    assert "nodes = 2" in Path("one.toml").read_text()
    assert render("two.toml", "--out", ".") == ExitCode.BAD_INPUT
    assert render("two.toml") == 0
    assert load_spec("deploy/two/run.toml").name == "two"


def test_a_model_of_one_s_own_goes_into_the_folder_and_with_the_job(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("mine.toml").write_text('[model]\nkind = "my_model:MyModel"\n')
    Path("my_model.py").write_text('class MyModel:\n    text = "$HOME \\ {{x}}"  \n')
    assert render("mine.toml", *AWS) == 0
    folder = tmp_path / "deploy" / "mine"
    assert (folder / "my_model.py").read_text() == Path("my_model.py").read_text()
    assert carried(folder) == Path("my_model.py").read_text()

    (folder / "my_model.py").write_text("class MyModel:\n    pass\n")
    assert render(str(folder / "run.toml")) == 0
    assert "edited" not in capsys.readouterr().out
    assert carried(folder) == (folder / "my_model.py").read_text()


def carried(folder: Path) -> str:
    """The text of the model's file in the spec that the job reads."""
    parts = yaml.safe_load_all((folder / "kubernetes_job.yaml").read_text())
    spec = next(one["data"]["spec.toml"] for one in parts if one["kind"] == "ConfigMap")
    return resolve(tomllib.loads(spec)).model.code
