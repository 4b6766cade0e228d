"""The types of the public API; `__init__.py` loads each name on first use."""

from embark.data.check import check as check_data
from embark.data.export.embeddings import write_embeddings
from embark.data.export.id_values import write_id_maps
from embark.data.prepare.prepare import prepare_from_spec as prepare_data
from embark.diagnose.report import diagnose_targets as diagnose_run
from embark.doctor.machine import plan_this_machine as plan_here
from embark.errors import EmbarkError
from embark.export.rollback import list_versions
from embark.export.rollback import rollback as rollback_model
from embark.lint.check import lint as lint_files
from embark.lint.rendered import render_spec as render_files
from embark.plan.plan import PlanRequest
from embark.plan.plan import plan as plan_run
from embark.plan.serving import ServeRequest, plan_serving
from embark.report.compare import compare_runs
from embark.report.context import read_run
from embark.serve.endpoint import Endpoint
from embark.serve.predict import predict
from embark.serve.score_file import model_inputs, score_file
from embark.serve.server import serve as serve_model
from embark.spec import RunSpec, load_spec
from embark.spec.serve import ScoringDevice
from embark.store.checkpoint_inspect import list_checkpoints
from embark.trainers import evaluate, export_run, feature_importance, train
from embark.trainers.torch.scoring.portable_model import export_portable
from embark.tuning.tune import TuneRequest, tune

__version__: str
__all__ = [
    "EmbarkError", "Endpoint", "PlanRequest", "RunSpec", "ScoringDevice", "ServeRequest", "TuneRequest", "check_data",
    "compare_runs", "diagnose_run", "evaluate", "export_portable", "export_run", "feature_importance", "lint_files",
    "list_checkpoints", "list_versions", "load_spec", "model_inputs", "plan_here", "plan_run", "plan_serving",
    "predict", "prepare_data", "read_run", "render_files", "rollback_model", "score_file", "serve_model", "train",
    "tune", "write_embeddings", "write_id_maps",
]
