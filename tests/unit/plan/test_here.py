"""A plan for this machine says what a run there would be predicted, and knows what it does not know."""

import pytest

from embark.errors import UserError
from embark.plan.here import LocalGpu, ThisMachine, plan_here
from embark.plan.predict import predict_local
from embark.spec import load_spec

GIB = 2.0**30
CPU = ThisMachine(2, 16 * GIB)
H200 = LocalGpu("NVIDIA H200", 140 * GIB, (9, 0))


@pytest.mark.parametrize(("machine", "here"), [
    (CPU, {"device": "cpu", "device_name": "2 CPU threads", "engine": "pipeline", "device_bytes": 0}),
    (ThisMachine(16, 64 * GIB, (H200,)),
     {"device": "cuda", "device_name": "NVIDIA H200", "engine": "cuda_graph", "device_bytes": 140 * GIB}),
])
def test_it_foresees_what_the_run_itself_then_foresees(machine, here):
    spec = load_spec("quickstart", [])
    plan = plan_here(spec, machine)
    run = predict_local(spec, {**here, "precision": plan.precision, "world_size": 1, "local_world_size": 1,
                               "host_bytes": machine.host_bytes})
    assert plan.is_ok
    assert (plan.device, plan.engine) == (here["device"], here["engine"])
    assert plan.step.total_s == run["step_s"]
    assert (plan.memory.device or plan.memory.host) == run["parts"]
    assert plan.train_s == plan.step.total_s * plan.workload.num_steps
    assert "$" not in plan.sentence


def test_what_does_not_fit_says_why_and_where_to_look():
    plan = plan_here(load_spec("criteo-1tb", ["place.machine=p5.48xlarge"]), CPU, 100_000)
    assert (plan.is_ok, plan.step) == (False, None)
    assert "98.1 GiB" in plan.sentence
    assert "embark plan --across" in plan.sentence
    assert plan.to_dict()["fits"] is False


def test_several_gpus_are_used_where_one_is_too_small():
    spec, gpu = load_spec("criteo-1tb", []), LocalGpu("NVIDIA A100-SXM4-40GB", 40 * GIB, (8, 0))
    one, four = (plan_here(spec, ThisMachine(64, 120 * GIB, (gpu,) * num), 100_000) for num in (1, 4))
    assert (one.is_ok, one.num_ranks) == (False, 1)
    assert (four.is_ok, four.num_ranks) == (True, 4)
    assert "torchrun --nproc-per-node 4" in four.sentence


def test_an_unknown_gpu_is_planned_by_memory_without_a_time():
    plan = plan_here(load_spec("quickstart", []), ThisMachine(16, 64 * GIB, (LocalGpu("Quadro Z9", 8 * GIB, (8, 6)),)))
    assert (plan.is_ok, plan.step) == (True, None)
    assert "Quadro Z9 is not known" in plan.sentence


def test_a_captured_step_on_a_cpu_is_planned_without_a_time():
    plan = plan_here(load_spec("quickstart", ["train.table_dtype=bf16"]), CPU)
    assert (plan.is_ok, plan.engine, plan.step) == (True, "cuda_graph", None)
    assert "on a CPU, one operation at a time, is not known" in plan.sentence


def test_an_old_gpu_gets_the_precision_that_the_trainer_takes():
    machine = ThisMachine(16, 64 * GIB, (LocalGpu("Tesla T4", 15 * GIB, (7, 5)),))
    assert plan_here(load_spec("quickstart", []), machine).precision == "fp32"


@pytest.mark.parametrize("device", ["cuda", "jax", "tpu"])
def test_a_device_that_it_cannot_plan_is_refused(device):
    with pytest.raises(UserError, match=r"place\.device"):
        plan_here(load_spec("quickstart", [f"place.device={device}"]), CPU)


def test_a_cpu_run_beside_a_gpu_says_that_it_stays_unused():
    plan = plan_here(load_spec("quickstart", ["place.device=cpu"]), ThisMachine(16, 64 * GIB, (H200,)))
    assert (plan.device, plan.num_ranks) == ("cpu", 1)
    assert any("1 GPU" in note for note in plan.notes)
