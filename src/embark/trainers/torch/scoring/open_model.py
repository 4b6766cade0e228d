"""Opens an exported model on the device that is to score with it."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING, TypeAlias

import torch

from embark.errors import UserError
from embark.export.artifact import Artifact
from embark.spec.serve import ScoringDevice
from .cpu_model import ExportedModel, ExportedSequenceModel

if TYPE_CHECKING:
    from .gpu_model import GpuModel

ScoringModel: TypeAlias = "ExportedModel | GpuModel"


def open_model(artifact: Artifact, model_file: str, device: ScoringDevice,
               onto: ScoringModel | None = None) -> ScoringModel:
    """Load an artifact; `model_file` is the code of a custom model.

    On a GPU, where `artifact` is a delta of the version that `onto` scores with, the delta is written into that one's
    tables, which nobody may use meanwhile.
    """
    has_triton = find_spec("triton") is not None
    has_gpu = torch.cuda.is_available() and has_triton
    model = artifact.info.model
    only_cpu = "several tasks" if model.tasks else "a retrieval model" if model.kind == "two_tower" else \
        "a model of sequences" if model.has_sequences else "a model of weighted ids" if model.has_weighted_ids else ""
    if device.kind == "cpu" or (device.kind == "auto" and (only_cpu or not has_gpu)):
        return open_on_cpu(artifact, model_file)
    if only_cpu:
        raise UserError(f"--device cuda: {only_cpu} is not scored on a GPU yet", "--device cpu, or auto")
    if not has_gpu:
        raise UserError(f"--device cuda: {'torch finds no GPU' if has_triton else 'Triton is not installed'}",
                        "`embark doctor` examines this machine; --device cpu serves without a GPU")
    from .gpu_model import GpuModel

    if isinstance(onto, GpuModel) and onto.advance(artifact, model_file):
        return onto
    return GpuModel(artifact, model_file, precision=device.precision)


def open_on_cpu(artifact: Artifact, model_file: str) -> ExportedModel:
    """Load on the CPU even if there is a GPU."""
    kind = ExportedSequenceModel if artifact.info.model.has_sequences else ExportedModel
    return kind(artifact, model_file)
