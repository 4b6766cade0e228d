"""The batch script of Slurm: what it asks for, what runs the ranks, and after which exit codes it starts again."""

from __future__ import annotations

import base64
import re
import subprocess
import tomllib

import pytest
from limits import HANG_S

from embark.catalog import load_catalog
from embark.errors import SpecError
from embark.lint.check import lint_texts
from embark.render.job import EXITS, make_job
from embark.render.render import render
from embark.render.targets.slurm import SCRIPT, Search, script, search_job
from embark.spec import load_spec


def text_of(*sets: str) -> str:
    return script(make_job(load_spec("quickstart", ["place.target=slurm", *sets]), load_catalog()), "Trains.")


def options(text: str) -> list[str]:
    return re.findall(r"^#SBATCH (.*)$", text, re.MULTILINE)


def test_whole_nodes_without_gpus_are_asked_for_by_default():
    asked = options(text_of("place.nodes=2"))
    assert asked == ["--job-name=quickstart", "--nodes=2", "--ntasks-per-node=1", "--exclusive", "--mem=0",
                     "--signal=B:TERM@120", "--requeue", "--open-mode=append", "--output=%x-%j.log"]


def test_every_field_is_asked_for():
    asked = options(text_of(
        "place.max_hours=1.5", "place.grace_s=300", "place.slurm.partition=gpu", "place.slurm.account=Lab_1",
        "place.slurm.qos=high", "place.slurm.constraint=h100&ib", "place.slurm.gpus_per_node=4",
        "place.slurm.cpus_per_node=32", "place.slurm.memory_gib=200", 'place.slurm.options=["--reservation=x"]'))
    assert {"--gpus-per-node=4", "--cpus-per-task=32", "--mem=200G", "--time=90", "--signal=B:TERM@300",
            "--partition=gpu", "--account=Lab_1", "--qos=high", "--constraint=h100&ib", "--reservation=x"} <= set(asked)
    assert "--exclusive" not in asked


def test_a_machine_of_the_catalog_gives_gpus_settings_and_price():
    text = text_of("place.machine=Standard_ND96asr_v4", "place.nodes=2")
    assert "--gpus-per-node=8" in options(text)
    assert "--nproc-per-node=8" in text
    assert "export EMBARK_USD_PER_HOUR=" in text
    assert "export NCCL_IB_PCI_RELAXED_ORDERING=1" in text
    assert "--gpus-per-node=4" in options(text_of("place.machine=4xH100"))
    assert "export EMBARK_USD_PER_HOUR=20\n" in text_of("place.nodes=2", "place.slurm.usd_per_node_hour=10")


def test_exit_codes_are_those_of_the_table():
    text = text_of()
    for row in EXITS:
        line = next(line for line in text.splitlines() if re.match(rf"  ([\d |]+ \| )?{int(row.code)}(\)| \|)", line))
        assert ("AGAIN=1" in line or "1[2-9]" in line) == row.must_retry


@pytest.mark.parametrize(("container", "expected"), [
    ("pyxis", "--container-image=ghcr.io#me/embark:1"), ("apptainer", "docker://ghcr.io/me/embark@sha256:" + "0" * 64),
])
def test_a_container_runs_the_image_beside_the_data(container, expected):
    text = text_of(f"place.slurm.container={container}", f"place.image=ghcr.io/me/embark:1@sha256:{'0' * 64}",
                   'place.slurm.mounts=["/data"]', "place.slurm.venv=/shared/venv")
    assert expected in text
    assert "$PWD" in text
    assert "/data" in text
    assert "/shared/venv" not in text


def test_a_search_is_an_array_of_jobs_with_one_process_each():
    spec = load_spec("quickstart", ["place.target=slurm", "place.nodes=4", "place.slurm.gpus_per_node=8"])
    search = Search(spec, ("--trials=9", "--workers=3"), 3)
    text = script(make_job(search_job(spec), load_catalog()), "Trains.", search)
    assert {"--job-name=quickstart-tune", "--nodes=1", "--gpus-per-node=1", "--array=0-2"} <= set(options(text))
    assert 'python -m embark tune "$SPEC" --trials=9 --workers=3' in text
    assert "torchrun --" not in text
    assert '"$SLURM_JOB_ID"' not in text  # of one job of an array it may stand for all
    encoded = re.search(r"export EMBARK_SPEC_BASE64=(\S+)", text)
    assert encoded
    sent = tomllib.loads(base64.b64decode(encoded[1]).decode())
    assert (sent["name"], sent["place"]["nodes"]) == ("quickstart", 4)


def test_a_file_takes_the_place_of_an_image():
    text = text_of("place.slurm.container=apptainer", "place.slurm.image_file=/shared/embark.sif")
    assert " /shared/embark.sif " in text


@pytest.mark.parametrize(("sets", "field"), [
    (("place.slurm.container=pyxis",), "place.slurm.container"), (("place.volume=fsx-lustre-1000",), "place.volume"),
    (("place.budget_usd=5",), "place.budget_usd"), (("train.batch_size=2047", "place.nodes=2"), "train.batch_size"),
])
def test_what_cannot_run_is_refused(sets, field):
    with pytest.raises(SpecError) as refused:
        text_of(*sets)
    assert [mistake.field for mistake in refused.value.mistakes] == [field]


@pytest.mark.parametrize("value", ["a b", "x;reboot", "$(reboot)", "x\n#SBATCH --uid=0"])
@pytest.mark.parametrize("field", ["partition", "account", "qos", "constraint", "venv", "image_file"])
def test_no_value_becomes_an_option_or_a_command(field, value):
    with pytest.raises(SpecError):
        load_spec("quickstart", [f'place.slurm.{field}="""{value}"""'])


def test_the_folder_has_the_script_and_the_linter_finds_nothing():
    job = make_job(load_spec("quickstart", ["place.target=slurm", "place.nodes=2"]), load_catalog())
    files = {file.path: file for file in render(job)}
    assert files[SCRIPT].is_executable
    assert lint_texts({SCRIPT: files[SCRIPT].text}) == []


@pytest.mark.needs("shellcheck")
@pytest.mark.parametrize("sets", [(), ("place.nodes=2", "place.max_hours=2"), (
    "place.nodes=2", "place.slurm.container=pyxis", "place.image=embark:1", 'place.slurm.setup=["module load cuda"]')])
def test_shellcheck_finds_nothing(sets):
    done = subprocess.run(["shellcheck", "--exclude=SC2016", "-"], input=text_of(*sets), text=True, capture_output=True,
                          timeout=HANG_S)
    assert not done.stdout
