"""Embark takes a recommendation model from raw rows to a trained model: one spec describes the run.

The names in `__all__` are the public Python API: the functions behind the commands, which return what the commands
print with `--json`. They load on first use, so `import embark` is instant and imports neither torch nor jax.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from embark.data.check import check as check_data
    from embark.data.prepare.prepare import prepare_from_spec as prepare_data
    from embark.diagnose.targets import diagnose_targets as diagnose_run
    from embark.errors import EmbarkError
    from embark.lint.check import lint as lint_files
    from embark.render.render import render_spec as render_files
    from embark.report.context import read_run
    from embark.spec import RunSpec, load_spec
    from embark.store.checkpoint_inspect import list_checkpoints
    from embark.trainers import train

__version__ = "0.1.0"
__all__ = [
    "EmbarkError", "RunSpec", "check_data", "diagnose_run", "lint_files", "list_checkpoints",
    "load_spec", "prepare_data", "read_run", "render_files", "train",
]
_LOCATIONS = {
    "EmbarkError": "errors:EmbarkError",
    "RunSpec": "spec:RunSpec",
    "check_data": "data.check:check",
    "diagnose_run": "diagnose.targets:diagnose_targets",
    "lint_files": "lint.check:lint",
    "list_checkpoints": "store.checkpoint_inspect:list_checkpoints",
    "load_spec": "spec:load_spec",
    "prepare_data": "data.prepare.prepare:prepare_from_spec",
    "read_run": "report.context:read_run",
    "render_files": "render.render:render_spec",
    "train": "trainers:train",
}


def __getattr__(name: str) -> Any:
    if name not in _LOCATIONS:
        raise AttributeError(f"module 'embark' has no attribute {name!r}")
    module, _, attribute = _LOCATIONS[name].partition(":")
    value = globals()[name] = getattr(import_module(f"embark.{module}"), attribute)
    return value


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
