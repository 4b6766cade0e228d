"""`embark plan`: a verdict for every question, clear words for a wrong one."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from limits import HANG_S
from plan_setups import written_calibration
from prepared_rows import FIXED, make_prepared

from embark.__main__ import run
from embark.catalog.pricing import POD_GRACE_S
from embark.cli.console import Console
from embark.cli.plan import plan as plan_command
from embark.errors import EmbarkError, ExitCode
from embark.plan.calibration import clear_cache

ROOT = Path(__file__).parents[3]
HUGE = ("model.rows_per_table=2000000000", "model.num_tables=200")
FEW = ("model.rows_per_table=40000000", "model.num_tables=5")
"""Nearly as large as Criteo's, and planned sooner."""
P4D = ("place.machine=p4d.24xlarge",)


@pytest.fixture(autouse=True)
def calibrated(tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.chdir(tmp_path)
    written_calibration(tmp_path / "data")
    clear_cache()
    yield
    clear_cache()


def plan(capsys, *sets, code=ExitCode.DONE, spec="criteo-1tb", quiet=False, **requests):
    assert plan_command(spec, set_=sets, console=Console(quiet=quiet), **requests) == code
    return capsys.readouterr().out


def data(capsys, *sets, code=ExitCode.DONE, spec="criteo-1tb", **requests):
    assert plan_command(spec, set_=sets, console=Console(json=True), **requests) == code
    return json.loads(capsys.readouterr().out)


def test_quiet_says_the_verdict_alone(capsys):
    assert len(plan(capsys, *P4D, quiet=True).splitlines()) == 1


def test_json_has_every_part_with_its_unit(capsys):
    payload = data(capsys, *P4D, samples=4_195_197_692)
    assert payload["fits"]
    assert payload["workload"]["num_steps"] == 4_195_197_692 // 65_536
    assert payload["memory"]["device_total_bytes"] == pytest.approx(sum(payload["memory"]["device_bytes"].values()))
    assert set(payload["bills"]) == {"on_demand", "spot", "block", "commit_1y", "commit_3y"}
    spot = payload["bills"]["spot"]
    assert spot["total_usd"] == pytest.approx(spot["machines_usd"] + spot["storage_usd"])
    assert spot["saves"]["checkpoint_bytes"] == pytest.approx(105.4e9, rel=0.01)
    assert payload["storage"]["offers"][0]["is_enough"]
    assert payload["step"]["total_s"] > 0
    assert not payload["step"]["is_calibrated"]


def test_what_does_not_fit_ends_with_1_and_the_nearest_that_does(capsys):
    payload = data(capsys, "place.machine=a2-highgpu-1g", *FEW, code=ExitCode.OTHER)
    assert not payload["fits"]
    assert payload["bills"] == {}
    assert [n["how"] for n in payload["nearest"]] == ["more machines", "a larger machine of the cloud", "the cheapest"]
    assert payload["nearest"][0]["num_nodes"] == 4


def test_tables_larger_than_any_cluster_are_reported_so(capsys):
    out = plan(capsys, *P4D, *HUGE, code=ExitCode.OTHER, max_nodes=1)
    assert "does not fit one p4d.24xlarge" in out
    assert "GiB" in out


def test_a_price_that_is_missing_is_reported(capsys):
    payload = data(capsys, "place.machine=p5e.48xlarge", region="us-west-2")
    missing = [bill for bill in payload["bills"].values() if bill["usd_per_hour"] is None]
    assert missing
    assert all(bill["total_usd"] is None and "no price" in bill["missing"] for bill in missing)
    assert "no price known: " in plan(capsys, "place.machine=p5e.48xlarge", region="us-west-2")


def test_a_tpu_is_planned_by_its_memory(capsys):
    out = plan(capsys, "place.machine=v5p-8")
    assert "fits one v5p-8 (4 x TPU-v5p)" in out
    assert "an estimate" in out
    assert "does not fit one v5litepod-4" in plan(capsys, "place.machine=v5e-4", *FEW, code=ExitCode.OTHER)


def test_eighty_columns_hold_the_ranking(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    out = plan(capsys, *FEW, across=True, cloud="gcp")
    table = out.split("machines ")[1].split("letters:")[0]
    assert all(len(line.rstrip()) <= 80 for line in table.splitlines()[1:-1])
    assert "us-central1" in out


def test_without_a_machine_the_complete_catalog_is_asked(capsys):
    assert "cheapest" in plan(capsys, cloud="azure")


def test_order_follows_the_bounds(capsys):
    by_usd = data(capsys, *FEW, across=True, cloud="aws")["ranked"]
    assert [r["total_usd"] for r in by_usd] == sorted(r["total_usd"] for r in by_usd)
    budget = by_usd[len(by_usd) // 2]["total_usd"]
    inside = data(capsys, *FEW, across=True, cloud="aws", budget=budget)["ranked"]
    assert [r["total_hours"] for r in inside] == sorted(r["total_hours"] for r in inside)
    assert max(r["total_usd"] for r in inside) <= budget
    assert len(inside) < len(by_usd)
    assert {r["cloud"] for r in inside} == {"aws"}
    assert any(r["is_on_front"] for r in by_usd)


def test_a_deadline_nobody_keeps_ends_with_1(capsys):
    out = plan(capsys, *FEW, across=True, cloud="azure", deadline=0.001, code=ExitCode.OTHER)
    assert "nothing here runs criteo-1tb within 3.6 s; the cheapest is" in out


def test_a_budget_that_one_setup_breaks_is_reported(capsys):
    assert "that is not for $0.50 or less" in plan(capsys, *P4D, budget=0.5, code=ExitCode.OTHER)
    assert "that is not for $0.0001 or less" in plan(capsys, *P4D, budget=0.0001, code=ExitCode.OTHER)


def test_spot_is_as_the_spec_says_unless_a_flag_does(capsys):
    assert data(capsys, *P4D, "place.spot=true")["purchase"] == "spot"
    assert data(capsys, *P4D, "place.spot=true", spot=False)["purchase"] == "on_demand"


def test_prepared_data_says_its_own_size_and_tables(capsys, tmp_path):
    rows = make_prepared(tmp_path / "rows", FIXED[:2])
    sets = ["data.kind=prepared", f"data.path={rows.path}", *P4D, "train.batch_size=8", "model.embedding_dim=4"]
    payload = data(capsys, *sets, spec="bare.toml")
    assert payload["workload"]["num_train_samples"] == rows.manifest.num_rows("train")
    assert payload["workload"]["data_bytes"] == rows.manifest.size_bytes
    assert list(payload["placement"]["shardings"]) == ["tiny", "wide"]


def test_a_plan_names_the_kind_that_the_data_decides(capsys, tmp_path):
    rows = make_prepared(tmp_path / "rows", FIXED[:1])  # numbers and words
    sets = ["data.kind=prepared", f"data.path={rows.path}"]
    assert data(capsys, *sets, *P4D, spec="bare.toml")["workload"]["model_kind"] == "tabm"
    assert "an epoch of tabm on 1,000 samples" in " ".join(plan(capsys, *sets, *P4D, spec="bare.toml").split())
    assert "for tabm on 1,000 samples" in plan(capsys, *sets, spec="bare.toml")
    assert "samples/s of dlrm" in plan(capsys, *sets, "model.kind=dlrm", spec="bare.toml", here=True)


@pytest.fixture(autouse=True)
def bare_spec(tmp_path, monkeypatch):
    """A spec that leaves its tables to its data."""
    monkeypatch.chdir(tmp_path)
    Path("bare.toml").write_text('name = "bare"\n')


STORED = ("data.kind=prepared", "data.path=s3://bucket/rows")


@pytest.mark.parametrize(
    ("sets", "requests", "what", "fix"),
    [
        (["place.machine=p5.48xlarg"], {}, "did you mean 'p5.48xlarge'", ""),
        (P4D, {"region": "eastus"}, "p4d.24xlarge: not offered in eastus", "us-west-2"),
        ((*P4D, "place.region=eastus"), {}, "p4d.24xlarge: not offered in eastus", "us-west-2"),
        ((), {"across": True, "region": "us-est-1"}, "knows no such region", "us-east-1"),
        ((), {"across": True, "cloud": "ibm"}, "'ibm': no such cloud", "aws"),
        (P4D, {"cloud": "gcp"}, "p4d.24xlarge is a machine of aws, not of gcp", "leave the cloud out"),
        ((*P4D, "place.cloud=azure"), {}, "is a machine of aws, not of azure", "catalog list --cloud azure"),
        ((*P4D, "place.nodes=0"), {}, "place.nodes = 0", ""),
        (P4D, {"max_nodes": 0}, "--max-nodes 0", "--max-nodes 16"),
        (P4D, {"deadline": 0.0}, "--deadline 0", "--deadline 8"),
        (P4D, {"budget": float("nan")}, "--budget nan", "--budget 8"),
        (P4D, {"samples": 0}, "--samples 0", "--samples 4195197692"),
        (P4D, {"samples": 5}, "fewer than train.batch_size", "train.batch_size"),
        ((), {"across": True, "exact": True}, "--exact plans for one machine", "leave --exact out"),
        (P4D, {"by": "hours"}, "--by needs the complete catalog", "--across"),
    ],
)
def test_bad_input_costs_a_sentence(sets, requests, what, fix):
    with pytest.raises(EmbarkError) as caught:
        plan_command("criteo-1tb", set_=sets, console=Console(), **requests)
    assert caught.value.exit_code == ExitCode.BAD_INPUT
    assert what in str(caught.value)
    assert fix in caught.value.fix


def test_data_elsewhere_cannot_say_its_size():
    sets = [*STORED, *P4D, "model.num_tables=2", "model.rows_per_table=100"]
    with pytest.raises(EmbarkError, match="s3://bucket/rows: cannot read the dataset's size from here") as caught:
        plan_command("bare.toml", set_=sets, console=Console())
    assert "--samples N" in caught.value.fix


@pytest.mark.parametrize("cloud", ["aws", "azure", "gcp"])
def test_the_examples_are_planned_where_their_data_is_not(capsys, cloud):
    """The guides' remedy for a lack of memory: plan with other settings."""
    spec = str(ROOT / "examples" / "cloud_deployment" / cloud / "run.toml")
    out = plan(capsys, spec=spec)
    assert "an epoch of dlrm on 4,195,197,692 samples" in " ".join(out.split())
    assert "/mnt/data/criteo-1tb cannot be read from here" in " ".join(out.split())

    def rank_bytes(*sets):
        return data(capsys, *sets, spec=spec)["memory"]["device_total_bytes"]

    full = rank_bytes()
    assert rank_bytes("place.nodes=4") <= full
    assert rank_bytes("train.table_dtype=fp16") < 0.6 * full
    assert rank_bytes("train.batch_size=32768") < full


def test_data_elsewhere_cannot_say_its_tables():
    with pytest.raises(EmbarkError, match="cannot read the tables from here") as caught:
        plan_command("bare.toml", set_=[*STORED, *P4D], console=Console(), samples=10**9)
    assert caught.value.exit_code == ExitCode.BAD_INPUT


@pytest.mark.parametrize("name", ["clicks", "ratings"])
def test_data_that_is_not_prepared_yet_is_named_with_its_command(capsys, name):
    rows = "".join(f"{at % 20},{at % 30},{at % 2 if name == 'clicks' else 1_700_000_000 + at}\n" for at in range(400))
    Path(f"{name}.csv").write_text("user,item," + ("clicked" if name == "clicks" else "timestamp") + "\n" + rows)
    assert run(["init", f"{name}.csv"]) == ExitCode.DONE
    capsys.readouterr()
    assert run(["plan", f"{name}.toml"]) == ExitCode.BAD_INPUT
    error = capsys.readouterr().err
    assert f"{name}-prepared: no prepared data yet" in error
    assert f"fix: `embark data prepare {name}.toml` writes it; or give [model] its tables" in error
    assert run(["data", "prepare", f"{name}.toml", "--quiet"]) == ExitCode.DONE
    assert run(["plan", f"{name}.toml"]) == ExitCode.DONE


@pytest.mark.slow
def test_torchrec_s_own_planner_places_the_tables_where_it_is_asked(capsys):
    payload = data(capsys, *P4D, exact=True, spec="laptop")
    assert payload["placement"]["made_by"] == "TorchRec's planner"
    assert set(payload["placement"]["shardings"]) == {f"cat_{i}" for i in range(8)}
    assert "TorchRec does not run on a TPU" in raised("place.machine=v5p-8", exact=True)


def raised(*sets, **requests):
    with pytest.raises(EmbarkError) as caught:
        plan_command("criteo-1tb", set_=sets, console=Console(), **requests)
    return str(caught.value)


QUICK = """
import sys
from embark.cli.console import Console
from embark.cli.plan import plan
from embark.spec import load_spec
plan("criteo-1tb", set_=["place.machine=p4d.24xlarge"], console=Console(quiet=True))
sys.exit(3 if any(m in sys.modules for m in ("torch", "torchrec", "pyarrow", "obstore")) else 0)
"""


def test_a_plan_needs_no_torch():
    done = subprocess.run([sys.executable, "-c", QUICK], capture_output=True, text=True, timeout=HANG_S, check=False)
    assert done.returncode == 0, done.stderr


def test_the_guide_s_commands_run(tmp_path):
    text = (ROOT / "docs" / "guides" / "plan.md").read_text()
    blocks = re.findall(r"^```bash run\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    assert len(blocks) == 5
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    for block in blocks:
        commands = block.replace("embark ", f"{sys.executable} -m embark ")
        done = subprocess.run(["bash", "-euc", commands], cwd=tmp_path, env=environment, capture_output=True, text=True,
                              timeout=HANG_S, check=False)
        assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "aws.json").read_text())["ranked"]


def test_the_guide_names_the_constants_that_are_used():
    from embark.plan.cost import COST

    text = (ROOT / "docs" / "guides" / "plan.md").read_text()
    graces = (f"({POD_GRACE_S['aws']:g} s on AWS, {POD_GRACE_S['azure']:g} s on Azure, {POD_GRACE_S['gcp']:g} s "
              "for pods on GKE)")
    for words in (f"{COST['boot_s']:g} s to boot", f"{COST['image_s']:g} s to pull an image", graces,
                  f"{COST['first_step_s']:g} s to the first", f"{COST['resumed_step_s']:g} s to the first",
                  f"{COST['replacement_s']:g} s for a replacement", f"{COST['eval_share']:g} of",
                  f"{COST['gpu_hours_between_failures']:,.0f} accelerator hours",
                  f"{COST['write_gbyte_per_s']:g} GB/s per process",
                  f"{COST['tpu_first_step_s']:g} s on TPUs",
                  f"{COST['copy_share']:g} of the bus", f"{COST['network_share']:g} of the network"):
        assert words in text


def test_a_plan_for_this_machine_has_no_dollars_and_no_cloud_flags(capsys):
    out = plan(capsys, "place.device=cpu", spec="quickstart", here=True)
    assert out.startswith("quickstart fits this machine (")
    assert "time of a step" in out
    assert "$" not in out
    found = data(capsys, "place.device=cpu", spec="quickstart", here=True)
    assert (found["fits"], found["num_ranks"], found["device"]) == (True, 1, "cpu")
    assert found["step"]["total_s"] * found["workload"]["num_steps"] == found["train_s"]
    with pytest.raises(EmbarkError, match="--budget"):
        plan_command("quickstart", here=True, budget=5.0)
    plan(capsys, *HUGE, "place.device=cpu", here=True, samples=100_000, code=ExitCode.OTHER)
