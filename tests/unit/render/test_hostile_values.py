"""Whatever a spec may hold, no value of it is run by a shell or read as something else."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from limits import HANG_S
from pydantic import ValidationError
from recorded_commands import run_script
from render_jobs import job_of

from embark.errors import SpecError, UserError
from embark.render.render import render_infrastructure
from embark.render.shell_text import Shell, _environment, command, option
from embark.render.targets.tpu_vm import render_tpu_vm
from embark.render.targets.vm_node import cloud_init
from embark.spec import resolve

NASTY = (
    "$(touch pwned)", "`touch pwned`", "'; touch pwned; '", '"; touch pwned; "', "a\ntouch pwned\n", "!!python/none",
    "a b", "${HOME}", "\\", "é’ü", "x" * 300, "-rf", "--help", "&& touch pwned", "*", "#", "\u2028touch pwned", "[x",
)
CHARACTERS = st.characters(codec="utf-8", exclude_characters="\x00")
TEXT = st.text(CHARACTERS, min_size=1, max_size=40) | st.sampled_from(NASTY)


def shell(text: str, folder: Path) -> str:
    done = subprocess.run(["bash", "-c", text], cwd=folder, capture_output=True, timeout=HANG_S, env={"PATH": "/bin"})
    assert done.returncode == 0, done.stderr
    return done.stdout.decode()


@given(st.lists(TEXT, min_size=1, max_size=4))
@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_words_reach_a_program_as_they_are(tmp_path: Path, words: list[str]):
    line = command("printf", "%s\\0", "first", *words, option("--last", words[0]))
    assert shell(line, tmp_path).split("\0")[1:-1] == [*words, f"--last={words[0]}"]
    assert not (tmp_path / "pwned").exists()


TEMPLATE = """\
@@header("About " ~ value)@@
# why: @@comment(value)@@
#% if value
NAME=${NAME:-@@value@@}
#% endif
printf %s "$NAME"@@value@@
"""


@given(TEXT)
@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_value_in_a_template_is_text_and_nothing_else(tmp_path: Path, value: str):
    text = _environment().from_string(TEMPLATE).render(value=value)
    assert shell(text, tmp_path) == value + value
    assert not (tmp_path / "pwned").exists()


def test_only_the_program_s_own_text_is_read_by_the_shell():
    assert command("echo", Shell('"$HOME"'), "$HOME") == "echo \"$HOME\" '$HOME'"


@pytest.mark.parametrize(("machine", "value"), [
    *(("p4d.24xlarge", value) for value in NASTY), *(("Standard_ND96asr_v4", value) for value in NASTY[:3]),
    *(("a2-highgpu-8g", value) for value in NASTY[:3])])
def test_a_bucket_or_path_of_any_name_is_quoted_or_refused(machine: str, value: str, tmp_path: Path):
    scheme = {"p": "s3", "S": "az", "a": "gs"}[machine[0]]
    for bucket, target in (("training", "job"), ("training", "vm"), (value, "job")):
        try:
            files = render_infrastructure(job_of(machine, root=f"{scheme}://{bucket}/{value}",
                                                 data=f"{scheme}://data/{value}", target=target))
        except (SpecError, UserError, ValidationError):
            continue
        for file in files:
            if file.path.endswith((".yaml", ".yml")):
                list(yaml.safe_load_all(file.text))
            if file.path.endswith(".json"):
                json.loads(file.text)
            if file.path.endswith(".sh"):
                words = {"vm.sh": ["up"], "budget.sh": ["quota"]}.get(file.path, ["--yes", "clean"])
                words = [] if not file.path.startswith(("vm", "budget", "train")) else words
                ran = run_script(files, file.path, words, tmp_path,
                                 {"PROJECT": "p", "EMAIL": "e@example.com", "SUBNET_ID": "subnet-1",
                                  "SKIP_QUOTA": "1"})
                assert ran.code == 0, (file.path, ran.output)
    assert not list(tmp_path.rglob("pwned"))


@pytest.mark.parametrize("field", ["name", "image", "namespace", "service_account", "identity", "account", "queue",
                                   "volume", "volume_path", "storage_account", "region", "zone"])
def test_hostile_names_are_refused(field: str):
    for value in (*NASTY, "x" * 500, 'a"b', "a'b", "a;b", "a#b", "a&b"):
        if value == "x" * 300:
            continue
        with pytest.raises(SpecError) as raised:
            resolve({"name": value} if field == "name" else {"place": {"cloud": "aws", field: value}})
        assert [mistake.field for mistake in raised.value.mistakes] == ["name" if field == "name" else f"place.{field}"]


@given(TEXT)
@settings(max_examples=30)
def test_the_spec_travels_into_the_machine_as_it_is(text: str):
    job = job_of("p4d.24xlarge", data=f"s3://data/{text}", target="vm")
    files = {f["path"]: f["content"] for f in yaml.safe_load(cloud_init(job, "RANK=0\nMASTER=x").text)["write_files"]}
    assert files["/etc/embark/spec.toml"] == job.spec_toml


@given(TEXT)
@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_and_into_a_tpu_s_hosts(tmp_path: Path, text: str):
    job = job_of("v5litepod-16", data=f"gs://data/{text}", target="tpu-vm")
    node = next(f.text for f in render_tpu_vm(job) if f.path == "tpu_node.sh")
    first = node.split("\n\n")
    start = next(i for i, part in enumerate(first) if part.startswith("mkdir"))
    complete = "\n\n".join(first[start:]).split("\n\nif ! /opt")[0].replace(
        "/etc/embark", str(tmp_path / "etc")).replace("/var/lib/embark", str(tmp_path / "state"))
    shell(f"export PATH=/bin:/usr/bin\n{complete}", tmp_path)
    assert (tmp_path / "etc" / "spec.toml").read_bytes().decode() == job.spec_toml
    assert not (tmp_path / "pwned").exists()
