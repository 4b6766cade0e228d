"""Setups to plan: the shipped catalog, a calibration that no later measurement moves, and predictions made by hand."""

from functools import cache

from embark.catalog.load import HERE, read_catalog
from embark.model.placement import Placement, Shard
from embark.plan.calibration import calibration_for, read_calibrations
from embark.plan.closed_form import CachedPlanner
from embark.plan.predict import predict
from embark.plan.prediction import MemoryUse, Prediction, Setup, StepTime
from embark.plan.survey import Estimator
from embark.plan.workload import workload_of
from embark.spec import load_spec

CALIBRATION = """
[H200]
title = "NVIDIA H200"
date = "2026-11-15"
versions = "none"
rates = { copy_bytes = 4.0e12, upload_bytes = 5.0e10, synthetic_values = 3e7, \
matmul_flops = { fp32 = 5e13, tf32 = 3.5e14, bf16 = 6.5e14 } }
engines.cuda_graph = { host_s = 0, host_layer_s = 0, host_group_s = 0, host_wait = 0, start_s = 8e-5, \
layer_s = 5e-6, group_s = 0, sort_s = 0, large_sort_s = 0, cross_s = 0, skewed_s = 0, mean_s = 0, \
layer_sample_s = 0, sort = 1.5, lookup = 1.5, update = 1.5, \
state = 1.5, matmul = 1.3, weights = 0, activations = 1.3, interaction = 1.3, crossing = 1.3 }
engines.pipeline = { host_s = 5e-3, host_layer_s = 1e-4, host_group_s = 0, host_wait = 0, start_s = 5e-4, \
layer_s = 1e-5, group_s = 0, sort_s = 0, large_sort_s = 0, cross_s = 0, skewed_s = 0, mean_s = 0, \
layer_sample_s = 0, sort = 3, lookup = 3, update = 3, state = 3, \
matmul = 1.5, weights = 0, activations = 3, interaction = 3, crossing = 3 }
memory.cuda_graph = { context_bytes = 6e8, workspace_bytes = 3e8, pooled = 1.1, layers = 1.1, \
ids = 1.1, gaps = 0.05 }
memory.pipeline = { context_bytes = 6e8, workspace_bytes = 3e8, pooled = 1.5, layers = 1.5, \
ids = 6, gaps = 0.1 }
memory.host = { context_bytes = 3e9, workspace_bytes = 0, pooled = 0, layers = 0, \
ids = 0, gaps = 0 }
"""


@cache
def shipped_catalog():
    """Whatever this user has taken in."""
    return read_catalog(HERE)


def written_calibration(folder):
    """As `XDG_DATA_HOME/embark/calibration.toml`, for verbs to find."""
    path = folder / "embark" / "calibration.toml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(CALIBRATION)
    return path


def real_estimator(folder, spec="criteo-1tb", sets=(), data_size=None, **more):
    """Predictions of the real closed form by the fixed calibration."""
    known = read_calibrations(written_calibration(folder))
    planner = CachedPlanner()
    loaded = load_spec(spec, sets) if isinstance(spec, str) else spec

    def ask(setup):
        return predict(setup, planner=planner, calibration=calibration_for(setup.machine.gpu, known))

    return Estimator(loaded, workload_of(loaded, data_size), shipped_catalog(), ask, **more)


def setup_of(name="p4d.24xlarge", nodes=1, spec="criteo-1tb", sets=()):
    return Setup(load_spec(spec, sets), shipped_catalog().machines[name], nodes)


def made(setup, step_s=0.01, *, fits=True, is_calibrated=False, why="made by hand"):
    """A prediction: rows dealt out equally, a step of a given time."""
    spec, ranks = setup.spec, setup.num_ranks
    placement = dealt_out(spec.model.table_list(), ranks)
    step = StepTime({"dense layers": step_s}, step_s, "dense layers", is_calibrated, "by hand")
    memory = MemoryUse({"tables": 1e9}, 40e9, {"processes": 1e9}, 500 * 1024.0**3)
    return Prediction(setup, "cuda_graph", "by hand", placement if fits else None, memory, step if fits else None, fits,
                      why)


@cache
def dealt_out(tables, ranks):
    shards = tuple(Shard(t.name, rank, t.rows // ranks + (rank < t.rows % ranks), t.dim)
                   for t in tables for rank in range(ranks))
    return Placement(ranks, shards, {t.name: "row_wise" for t in tables}, "hand")


def hand_estimator(step_s, spec="criteo-1tb", sets=(), data_size=None, **more):
    """`step_s(setup)` gives the seconds of a step, or None where it does not fit."""
    loaded = load_spec(spec, sets)

    def ask(setup):
        seconds = step_s(setup)
        fits = seconds is not None
        return made(setup, seconds or 1.0, fits=fits, why="ok" if fits else "too small by hand")

    return Estimator(loaded, workload_of(loaded, data_size), shipped_catalog(), ask, **more)
