"""What no single line says: the network that was taken, the rank that is slow, the plan that was not kept."""

from __future__ import annotations

import json

import pytest

from embark.catalog import load_catalog
from embark.diagnose.report import diagnose, memory_advice
from embark.diagnose.source import sources_of
from embark.plan.predict import predict
from embark.spec.load import resolve

SOCKETS = ("dlrm-0:41:41 [0] NCCL INFO NET/Socket : Using [0]eth0:10.0.1.5<0>\n"
           "dlrm-0:41:41 [0] NCCL INFO Using network Socket\n")
TCP_ALONE = next(m.name for m in load_catalog().machines.values() if m.fabric.transport == "tcp")
TABLES = {"num_tables": 26, "rows_per_table": 10_000_000, "embedding_dim": 128, "num_dense": 13}


def spec_on(machine: str, nodes: int = 2, **train: object):
    return resolve({"name": "dlrm", "model": TABLES, "train": {"batch_size": 65_536, **train},
                    "place": {"machine": machine, "nodes": nodes}})


@pytest.fixture
def look(tmp_path):
    def looked(text: str, name: str = "train.log", spec=None):
        (tmp_path / name).write_text(text)
        return diagnose(sources_of([str(tmp_path / name)]).sources, spec=spec)

    return looked


@pytest.mark.parametrize(
    ("machine", "wanted"),
    [("p5.48xlarge", "vpc.amazonaws.com/efa: 32"), ("Standard_ND96isr_H100_v5", "rdma/ib"),
     ("a3-highgpu-8g", "GPUDirect-TCPX's annotations")],
)
def test_sockets_where_the_machine_has_a_fabric_are_reported(look, machine, wanted):
    report = look(SOCKETS, spec=spec_on(machine))
    assert [one.name for one in report.diagnoses] == ["tcp-instead-of-fabric"]
    assert wanted in report.diagnoses[0].fix
    assert report.diagnoses[0].evidence.line == 1


@pytest.mark.parametrize(
    ("text", "machine", "nodes"),
    [(SOCKETS, "p5.48xlarge", 1), (SOCKETS, TCP_ALONE, 2), (SOCKETS, "", 2),
     (SOCKETS + "dlrm-0:41:41 [0] NCCL INFO Using network AWS Libfabric\n", "p5.48xlarge", 2)],
    ids=["one machine", "no fabric", "no machine named", "the fabric was taken"],
)
def test_sockets_are_no_fault_elsewhere(look, text, machine, nodes):
    assert look(text, spec=spec_on(machine, nodes)).diagnoses == ()


def test_out_of_memory_says_what_the_plan_says_would_fit(look):
    spec = spec_on("g5.xlarge", nodes=1)
    report = look("torch.OutOfMemoryError: CUDA out of memory.\n", spec=spec)
    fix = report.diagnoses[0].fix
    assert "does not fit 1 x g5.xlarge" in fix
    number = int(fix.partition("place.nodes=")[2].split(".")[0].split(",")[0].split(" ")[0])
    assert not predict_fits(spec, 1)
    assert predict_fits(spec, number)


def predict_fits(spec, nodes: int) -> bool:
    from embark.plan.prediction import Setup

    return predict(Setup(spec, load_catalog().machines["g5.xlarge"], nodes)).fits


def test_out_of_memory_of_what_should_fit_says_so(look):
    report = look("torch.OutOfMemoryError: CUDA out of memory.\n", spec=spec_on("p5.48xlarge"))
    assert "the plan says it fits 2 x p5.48xlarge" in report.diagnoses[0].fix


@pytest.mark.parametrize("line", ["Reason: OOMKilled\n", "failed (exitcode: -9) local_rank: 1 (pid: 75)\n"])
def test_advice_for_a_host_out_of_memory_is_about_the_host(look, line):
    fix = look(line, spec=spec_on("p5.48xlarge")).diagnoses[0].fix
    assert "a host of 2 x p5.48xlarge needs" in fix
    assert "processes" in fix
    assert "nvidia-smi" not in fix


def test_advice_for_tables_that_do_not_fit_is_what_would_fit(look):
    report = look("torchrec.distributed.planner.types.PlannerError: …\n", spec=spec_on("g5.xlarge", 1))
    assert (report.diagnoses[0].name, "place.nodes=" in report.diagnoses[0].fix) == ("tables-do-not-fit", True)


def events(*rows: dict) -> str:
    return "".join(json.dumps({"time_s": 1.0, "rank": 0, **row}) + "\n" for row in rows)


def steps(count: int, **values: object) -> list[dict]:
    return [{"event": "step", "step": 10 * (n + 1), "loss": 0.5, **values} for n in range(count)]


def ranks(count: int, **values: object) -> list[dict]:
    return [{"event": "ranks", "step": 10 * (n + 1), **values} for n in range(count)]


@pytest.mark.parametrize(
    ("rows", "name"),
    [
        ([*steps(3, step_s=0.1), {"event": "step", "step": 40, "loss": None, "step_s": 0.1}], "loss-not-a-number"),
        ([{"event": "start", "first_step": 0}, *steps(4), {"event": "save", "step": 30},
          {"event": "start", "first_step": 0}], "checkpoint-ignored"),
        ([{"event": "predict", "step_s": 0.02, "is_calibrated": True}, *steps(5, step_s=0.09)], "slower-than-planned"),
        ([*steps(5, step_s=0.1), *steps(5, step_s=0.1, rank=1), *steps(5, step_s=0.1, rank=2),
          *steps(5, step_s=0.2, rank=3)], "straggler"),
        ([*steps(5, step_s=0.2), *ranks(5, step_s=[0.1, 0.1, 0.1, 0.2])], "straggler"),
        ([{"event": "phases", "own_s": [0.1, None, 0.1, 0.1, 0.2]}] * 3, "straggler"),
        (steps(5, step_s=0.1, input_s=0.06), "slow-loader"),
        (ranks(5, step_s=[0.1, 0.1], input_s=[0.0, 0.06]), "slow-loader"),
        (ranks(3, systems=[{"host": "a", "gpus": [{"index": 3, "temperature_c": 91.0}]}]), "gpu-throttled"),
        (ranks(2, systems=[{"host": "a", "host_used_bytes": 96e9, "host_bytes": 100e9}]), "host-memory-nearly-full"),
        ([{"event": "error", "text": "out of GPU memory: CUDA out of memory. Tried to allocate 2.00 GiB"}],
         "gpu-out-of-memory"),
    ],
    ids=["NaN", "restart from 0", "slow", "straggler", "straggler by ranks", "straggler by phases", "loader",
         "loader of one rank", "hot", "memory", "error"],
)
def test_events_are_judged(look, rows, name):
    report = look(events(*rows), "events.jsonl")
    assert [one.name for one in report.diagnoses] == [name]
    assert report.diagnoses[0].evidence.line > 0


def test_a_step_time_is_printed_with_three_digits(look):
    predicted = {"event": "predict", "step_s": 0.005, "is_calibrated": True}
    report = look(events(predicted, *steps(5, step_s=0.0266)), "events.jsonl")
    assert report.diagnoses[0].cause.startswith("a step takes 26.6 ms; the plan predicted 5.00 ms on")


@pytest.mark.parametrize(
    "rows",
    [
        [{"event": "start", "first_step": 0}, *steps(4, step_s=0.1), {"event": "save", "step": 30},
         {"event": "start", "first_step": 30}, {"event": "end", "outcome": "done"}],
        [{"event": "predict", "step_s": 0.02, "is_calibrated": False}, *steps(5, step_s=0.09)],
        [{"event": "predict", "step_s": 0.02, "is_calibrated": True}, *steps(5, step_s=0.025)],
        [{"event": "step"}, {"event": 7}, {}, {"event": "ranks", "step_s": 3, "input_s": [None, "x"]},
         {"event": "ranks", "step_s": [None, "x"], "input_s": {}}, {"event": "phases", "own_s": "no"}],
        [*steps(5, step_s=0.2), *ranks(5, step_s=[0.1, 0.11, 0.1, 0.1], input_s=[0.0, 0.01, 0.0, 0.0])],
        [*ranks(2, systems=[{"host": "a", "gpus": [{"index": 3, "temperature_c": 91.0}]}]),
         *ranks(5, systems=[{"host": "a", "gpus": [{"index": 3, "temperature_c": 70.0}]}])],
        [*ranks(2, systems=[{"host": "a", "host_used_bytes": 96e9, "host_bytes": 100e9}]),
         *ranks(1, systems=[{"host": "a", "host_used_bytes": 60e9, "host_bytes": 100e9}])],
        ranks(3, systems=[{"host": 3}, {"host": "a", "gpus": {"x": 1}}, None, {"host": "b", "gpus": [7, {}]}]),
    ],
    ids=["resumed", "not calibrated", "as planned", "odd", "ranks alike", "hot for a moment", "memory that went down",
         "odd systems"],
)
def test_events_of_a_healthy_run_say_nothing(look, rows):
    assert look(events(*rows) + "{cut", "events.jsonl").diagnoses == ()


def test_what_a_log_and_an_event_both_show_is_reported_once(tmp_path):
    (tmp_path / "events.jsonl").write_text(events({"event": "step", "step": 2, "loss": None, "step_s": 0.1}))
    (tmp_path / "train.log").write_text("[rank0]: train step 2/30 loss NaN AUC 0.5000\n")
    (one,) = diagnose(sources_of([str(tmp_path)]).sources).diagnoses
    assert (one.name, one.num_lines, one.ranks) == ("loss-not-a-number", 2, (0,))


@pytest.mark.parametrize(("machine", "seen"), [("p5.48xlarge", "on the GPU (nvidia-smi)"),
                                               ("v5litepod-64", "on the chip (fuser -v /dev/accel*")])
def test_what_fits_and_still_ran_out_is_looked_for_on_that_kind_of_device(machine, seen):
    spec = spec_on(machine, nodes=1)
    assert seen in memory_advice(spec)
