"""`embark image` with builders that record how they are called: what is built, pushed, named, and refused."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from embark.cli.console import Console
from embark.cli.render import image
from embark.errors import Fault, UserError
from embark.launch.image import ImageName
from embark.render.job import default_image
from embark.spec import load_spec

DIGEST = "sha256:" + "a1" * 32
ECR = "123456789012.dkr.ecr.us-west-2.amazonaws.com"
SPEC = """# the run
[place]
machine = "p5.48xlarge"
nodes = 2          # two machines
target = "{target}"
{image}
[store]
root = "s3://bucket/runs"
"""
BUILDER = """#!/bin/bash
{{ flock 9; printf '%s\\0' "${{0##*/}}" "$@" '' >&9; }} 9>>{record}
case $1 in
  info) exit {info} ;;
  build) ls -A "${{@: -1}}" "${{@: -1}}/dist" >{record}.context
    echo STEP 1; printf '%s\\n' {build_says}; exit {build} ;;
  push) if [ "$2" = --digestfile ]; then printf %s {digest} >"$3"; fi
    printf '%s\\n' {push_says} >&2; exit {push} ;;
  image) printf '["%s", "%s"]\\n' other/embark@sha256:00 {repository}@{digest} ;;
esac
"""


class Builders:
    """Programs on a PATH that has nothing else."""

    def __init__(self, folder: Path) -> None:
        self.record = folder / "record"
        self.folder = folder / "bin"
        self.folder.mkdir()

    def add(self, name: str, *, info: int = 0, build: int = 0, push: int = 0, build_says: str = "done",
            push_says: str = "done", repository: str = f"{ECR}/embark") -> None:
        values = {"build_says": f"'{build_says}'", "push_says": f"'{push_says}'", "repository": repository}
        text = BUILDER.format(record=self.record, info=info, build=build, push=push, digest=DIGEST, **values)
        (self.folder / name).write_text(text)
        (self.folder / name).chmod(0o755)

    @property
    def calls(self) -> list[list[str]]:
        return [call.split("\0") for call in self.record.read_text().split("\0\0") if call]

    @property
    def changes(self) -> list[list[str]]:
        return [call for call in self.calls if call[1] in ("build", "push")]


@pytest.fixture
def builders(tmp_path, monkeypatch) -> Builders:
    found = Builders(tmp_path)
    (found.folder / "ls").symlink_to("/bin/ls")
    monkeypatch.setenv("PATH", str(found.folder))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    return found


@pytest.fixture
def run_toml(builders) -> Path:
    return write_spec()


def write_spec(image: str = f"{ECR}/embark:1", target: str = "job") -> Path:
    path = Path("run.toml")
    path.write_text(SPEC.format(target=target, image=f'image = "{image}"' if image else ""))
    return path


def test_the_first_builder_that_works_builds_the_rendered_folder(builders, run_toml, capsys):
    builders.add("docker", info=1)
    builders.add("podman")
    builders.add("buildah")
    assert image("run.toml", console=Console()) == 0
    assert builders.changes == [["podman", "build", "--tag", f"{ECR}/embark:1", "deploy/run"]]
    context = Path(f"{builders.record}.context").read_text().split()
    assert {"Dockerfile", ".dockerignore", "entrypoint.sh", "dist"} <= set(context)
    assert [name for name in context if name.endswith(".whl")]
    assert f"built {ECR}/embark:1 with podman" in capsys.readouterr().out


def test_the_image_name_is_written_into_the_spec_and_every_file(builders, capsys):
    path = write_spec("")
    builders.add("docker")
    assert image("run.toml", tag=f"{ECR}/embark:2", console=Console()) == 0
    assert load_spec("run.toml").place.image == f"{ECR}/embark:2"
    assert "nodes = 2          # two machines\n" in path.read_text()
    assert f"image: {ECR}/embark:2\n" in Path("deploy/run/kubernetes_job.yaml").read_text()
    assert "wrote place.image" in capsys.readouterr().out


def test_a_name_without_a_tag_gets_the_version_s(builders):
    write_spec("")
    builders.add("docker")
    image("run.toml", tag="embark-quickstart", console=Console(quiet=True))
    assert load_spec("run.toml").place.image == f"embark-quickstart:{default_image().partition(':')[2]}"


@pytest.mark.parametrize("builder", ["docker", "podman", "buildah"])
def test_a_pushed_image_is_named_by_its_digest_and_keeps_its_tag(builders, run_toml, builder):
    builders.add(builder)
    assert image("run.toml", push=True, builder=builder, console=Console(quiet=True)) == 0
    assert load_spec("run.toml").place.image == f"{ECR}/embark:1@{DIGEST}"
    assert f"{ECR}/embark:1@{DIGEST}" in Path("deploy/run/kubernetes_job.yaml").read_text()
    builders.record.unlink()
    assert image("run.toml", push=True, builder=builder, console=Console(quiet=True)) == 0
    assert [[call[1], call[-1] if call[1] == "push" else call[3]] for call in builders.changes] == [
        ["build", f"{ECR}/embark:1"], ["push", f"{ECR}/embark:1"]], "the next build has the tag, not the old digest"


def test_options_after_two_dashes_go_to_the_builder(builders, run_toml, capsys):
    from embark.cli.app import app

    builders.add("docker")
    app(["image", "run.toml", "--json", "--", "--build-arg", "VARIANT=cpu"], result_action="return_value")
    assert builders.changes[0][4:6] == ["--build-arg", "VARIANT=cpu"]
    assert json.loads(capsys.readouterr().out)["builder"] == "docker"


def test_without_a_builder_that_works_it_says_which_to_install(builders, run_toml):
    with pytest.raises(UserError, match="docker, podman, buildah") as error:
        image("run.toml", console=Console(quiet=True))
    assert "apt-get install -y podman" in error.value.fix
    builders.add("docker", info=1)
    with pytest.raises(UserError, match="docker does not work here"):
        image("run.toml", builder="docker", console=Console(quiet=True))


@pytest.mark.parametrize("name", ["", "embark:1", "localhost/embark:1", "registry.example.com/embark:1"])
def test_a_name_without_a_registry_is_not_pushed(builders, name):
    path = write_spec(name)
    before = path.read_text()
    builders.add("docker")
    with pytest.raises(UserError, match="names no registry to push to") as error:
        image("run.toml", push=True, console=Console(quiet=True))
    assert ".dkr.ecr." in error.value.fix
    assert path.read_text() == before
    assert not builders.record.exists()


@pytest.mark.parametrize(("host", "builder", "login"), [
    (ECR, "podman",
     f"aws ecr get-login-password --region us-west-2 | podman login --username AWS --password-stdin {ECR}"),
    ("mine.azurecr.io", "docker", "az acr login --name mine"),
    ("mine.azurecr.io", "buildah",
     "az acr login --name mine --expose-token --query accessToken --output tsv | buildah login --username "
     "00000000-0000-0000-0000-000000000000 --password-stdin mine.azurecr.io"),
    ("us-docker.pkg.dev/p", "docker", "gcloud auth configure-docker us-docker.pkg.dev"),
    ("us-docker.pkg.dev/p", "podman", "gcloud auth print-access-token | podman login --username oauth2accesstoken "
                                      "--password-stdin us-docker.pkg.dev"),
    ("ghcr.io/me", "docker", "docker login ghcr.io"),
])
def test_without_a_login_the_fix_is_the_login_and_the_spec_stays(builders, host, builder, login):
    path = write_spec(f"{host}/embark:1")
    before = path.read_text()
    builders.add(builder, push=1, push_says="no basic auth credentials")
    with pytest.raises(Fault, match="no basic auth credentials") as error:
        image("run.toml", push=True, console=Console(quiet=True))
    assert error.value.fix == login
    assert path.read_text() == before


def test_a_missing_repository_is_reported_with_what_creates_it(builders, run_toml):
    builders.add("docker", push=1, push_says="name unknown: The repository with name embark does not exist")
    with pytest.raises(Fault) as error:
        image("run.toml", push=True, console=Console(quiet=True))
    assert error.value.fix == "aws ecr create-repository --repository-name embark --region us-west-2"
    name = ImageName.parse("us-docker.pkg.dev/my-project/team/embark:1")
    assert name.registry_command("create_repository") == (
        "gcloud artifacts repositories create team --repository-format=docker --location=us --project=my-project")


def test_a_failed_build_is_reported_by_its_last_line_and_changes_nothing(builders):
    path = write_spec("")
    before = path.read_text()
    builders.add("docker", build=1, build_says="ERROR: No matching distribution found for torch==2.13.0")
    with pytest.raises(UserError, match="No matching distribution"):
        image("run.toml", tag="embark:2", console=Console(quiet=True))
    assert path.read_text() == before


def test_what_has_no_image_or_no_file_is_refused(builders, monkeypatch):
    builders.add("docker")
    with pytest.raises(UserError, match="not a file"):
        image("quickstart", console=Console(quiet=True))
    Path("run.toml").write_text('[place]\nmachine = "v5litepod-16"\ntarget = "tpu-vm"\n[store]\nroot = "gs://b/runs"\n')
    with pytest.raises(UserError, match="uses no image"):
        image("run.toml", console=Console(quiet=True))


def test_an_edited_dockerfile_is_built_and_a_missing_one_is_refused(builders, run_toml):
    builders.add("docker")
    image("run.toml", console=Console(quiet=True))
    mine = Path("deploy/run/Dockerfile")
    mine.write_text(mine.read_text() + "# mine\n")
    image("run.toml", tag=f"{ECR}/embark:3", console=Console(quiet=True))
    assert mine.read_text().endswith("# mine\n")
    from embark.launch.image import build

    os.remove(mine)
    with pytest.raises(UserError, match="has no Dockerfile"):
        build("docker", Path("deploy/run"), ImageName.parse("embark:1"), (), lambda _: None)
