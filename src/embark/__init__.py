"""Embark takes a recommendation model from raw rows to a trained model: one spec describes the run.

The names in `__all__` are the public Python API: the functions behind many commands, which return what those print.
They load on first use, so `import embark` is instant and imports neither torch nor jax; their types are in
`__init__.pyi`.
"""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"
_LOCATIONS = {
    "EmbarkError": "errors:EmbarkError",
    "Endpoint": "serve.endpoint:Endpoint",
    "PlanRequest": "plan.plan:PlanRequest",
    "RunSpec": "spec:RunSpec",
    "ScoringDevice": "spec.serve:ScoringDevice",
    "ServeRequest": "plan.serving:ServeRequest",
    "TuneRequest": "tuning.tune:TuneRequest",
    "check_data": "data.check:check",
    "compare_runs": "report.compare:compare_runs",
    "diagnose_run": "diagnose.report:diagnose_targets",
    "evaluate": "trainers:evaluate",
    "export_portable": "trainers.torch.scoring.portable_model:export_portable",
    "export_run": "trainers:export_run",
    "feature_importance": "trainers:feature_importance",
    "lint_files": "lint.check:lint",
    "list_checkpoints": "store.checkpoint_inspect:list_checkpoints",
    "list_versions": "export.rollback:list_versions",
    "load_spec": "spec:load_spec",
    "model_inputs": "serve.score_file:model_inputs",
    "plan_here": "doctor.machine:plan_this_machine",
    "plan_run": "plan.plan:plan",
    "plan_serving": "plan.serving:plan_serving",
    "predict": "serve.predict:predict",
    "prepare_data": "data.prepare.prepare:prepare_from_spec",
    "read_run": "report.context:read_run",
    "render_files": "lint.rendered:render_spec",
    "rollback_model": "export.rollback:rollback",
    "score_file": "serve.score_file:score_file",
    "serve_model": "serve.server:serve",
    "train": "trainers:train",
    "tune": "tuning.tune:tune",
    "write_embeddings": "data.export.embeddings:write_embeddings",
    "write_id_maps": "data.export.id_values:write_id_maps"
}
__all__ = [*_LOCATIONS]


def __getattr__(name: str) -> Any:
    if name not in _LOCATIONS:
        raise AttributeError(f"module 'embark' has no attribute {name!r}")
    module, _, attribute = _LOCATIONS[name].partition(":")
    value = globals()[name] = getattr(import_module(f"embark.{module}"), attribute)
    return value


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
