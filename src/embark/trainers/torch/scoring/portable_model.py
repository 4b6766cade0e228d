"""`embark export --format`: a model as one module of plain torch, for runtimes without Embark: compiled, as an exported
program, or as ONNX, in a folder that appears complete or not at all.

    model.pt2 or model.onnx    the network and its tables; for Triton in the folder 1, beside config.pbtxt
    features.json              its tensors by name, type and shape, in the order of a call
    artifact.json              how a raw row becomes these tensors, as in a version of an exported model,
    id_maps.safetensors        and the ids of the values
"""

import json
import logging
import re
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path

import torch
import torch._inductor.config
from torch import Tensor, nn
from torch.nn.functional import embedding, embedding_bag

from embark.errors import MissingPackage, UserError
from embark.export.artifact import ID_MAPS, INFO, Artifact, ArtifactInfo, open_artifact
from embark.export.export_run import export_run
from embark.export.outputs import outputs_of
from embark.export.portable import DENSE_INPUT, ROWS, Format, inputs_of, output_tensors, triton_config
from embark.spec.model import ModelSpec, Table
from embark.store.atomic_file import scratch_folder_for
from embark.store.checkpoint_inspect import find_trained
from embark.trainers.torch.networks.task_heads import scores_of
from embark.values import frozen
from .cpu_model import load_network, weight_of

FEATURES = "features.json"
_EXAMPLE_SIZE = 3  # Of what is traced: sizes of 0 and 1 would be taken for constants.


@frozen
class PortableResult:
    """The model that `embark export --format` wrote."""

    run: str
    step: int
    path: str
    file: str
    runtime: str  # `aoti`, `onnx`, or `program`: an exported program that is not compiled.
    device: str
    torch: str = torch.__version__


class PortableModel(nn.Module):
    """Scores of ids and numbers, with lookups that need no FBGEMM."""

    def __init__(self, artifact: Artifact, model: ModelSpec, *, is_onnx: bool) -> None:
        super().__init__()
        self.names, self.is_onnx = [one.name for one in inputs_of(artifact.info)], is_onnx
        self.model, self.network = model, load_network(artifact, model)
        for table in model.table_list():
            self.register_buffer(f"rows_of_{table.weights}", torch.from_numpy(weight_of(artifact, table)))

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        given = dict(zip(self.names, inputs, strict=True))
        pooled = torch.cat([self._pooled(table, given) for table in self.model.table_list()], dim=1)
        logits = self.network(given.get(DENSE_INPUT, pooled[:, :0]), pooled)
        scores = scores_of(self.model.tasks, logits) if self.model.tasks else logits.sigmoid()
        return tuple(output.of(scores) for output in outputs_of(self.model))

    def _pooled(self, table: Table, given: dict[str, Tensor]) -> Tensor:
        """Return one vector for each row."""
        rows, ids = getattr(self, f"rows_of_{table.weights}"), given[f"{table.name}.ids"]
        offsets, is_mean = given.get(f"{table.name}.offsets"), table.pooling == "mean"
        if offsets is None:
            return embedding(ids, rows)
        if not self.is_onnx:
            return embedding_bag(ids, rows, offsets, mode="mean" if is_mean else "sum")
        # A bag of torch becomes a loop over the rows in ONNX, which takes a hundred times as long.
        starts = offsets.new_zeros(ids.shape[0] + 1).index_put((offsets,), torch.ones_like(offsets), accumulate=True)
        owners = starts[:-1].cumsum(0) - 1
        sums = rows.new_zeros(offsets.shape[0], rows.shape[1])
        sums = sums.index_put((owners,), embedding(ids, rows), accumulate=True)
        if not is_mean:
            return sums
        counts = torch.zeros_like(offsets).index_put((owners,), torch.ones_like(owners), accumulate=True)
        return sums / counts.clamp(min=1)[:, None]


def export_portable(
    run: str, to: str = "", *, format: Format = "aoti", step: int | None = None, force: bool = False,
) -> PortableResult:
    """Write a run's newest checkpoint, or that of `step`, into the folder `to`, by default RUN/FORMAT; for Triton into
    a folder of `to` that has the run's name. It is for a GPU where there is one and the run may have trained on it."""
    trained = find_trained(run, step)
    model, is_onnx, is_triton = trained.spec.model, format == "onnx", format == "triton"
    if model.has_sequences or model.has_weighted_ids:
        raise UserError(f"--format {format}: models of {'sequences' if model.has_sequences else 'weighted ids'} are "
                        "not exported to other runtimes yet", "leave --format out, and use `embark serve`")
    if is_onnx and not find_spec("onnxscript"):
        raise MissingPackage("--format onnx needs onnxscript, which is not installed",
                             "pip install 'embark-rec[onnx]'")
    has_compiler = any(map(shutil.which, filter(None, torch._inductor.config.cpp.cxx)))
    runtime = "aoti" if has_compiler else "program"
    if is_triton and not has_compiler:
        raise UserError("--format triton: there is no C++ compiler, and Triton runs compiled models alone",
                        "install g++, or name another compiler in CXX")
    folder = to or f"{trained.run_dir.uri}/{format}"
    if "://" in folder:
        raise UserError(f"--format {format}: {folder} is not a folder on this machine", "--to FOLDER, and copy it")
    target = Path(folder, trained.spec.name if is_triton else "")
    if target.exists() and not (force and (target / FEATURES).exists()):
        raise UserError(f"{target}: exists",
                        "name another folder with --to; --force replaces what `embark export --format` wrote")
    is_on_gpu = not is_onnx and trained.spec.place.device != "cpu" and torch.cuda.is_available()
    result = PortableResult(
        trained.run_dir.uri, trained.checkpoint.step, str(target), "model.onnx" if is_onnx else "model.pt2",
        "onnx" if is_onnx else runtime, "cuda" if is_on_gpu else "cpu")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{target}: cannot be written: {error.strerror}", "name another folder with --to") from None
    with scratch_folder_for(target) as scratch:
        written = export_run(trained.run_dir.uri, f"{scratch}/artifact", step=trained.checkpoint.step)
        artifact = open_artifact(written.uri)
        info = artifact.info
        module = PortableModel(artifact, info.model.changed(code=model.code), is_onnx=is_onnx)
        part = scratch / "part"
        path = part / ("1" if is_triton else "") / result.file
        path.parent.mkdir(parents=True)
        with torch.no_grad(), _quiet():
            _build(module, info, result, path)
        inputs, outputs = inputs_of(info), output_tensors(info)
        about = {**asdict(result), "inputs": inputs, "outputs": outputs}
        (part / FEATURES).write_text(json.dumps(about, default=asdict, indent=1) + "\n")
        if is_triton:
            (part / "config.pbtxt").write_text(triton_config(target.name, result.device, inputs, outputs))
        for file in (INFO, ID_MAPS):
            shutil.copyfile(artifact.folder / file, part / file)
        if target.exists():
            shutil.rmtree(target)
        part.rename(target)
    return result


def _build(model: PortableModel, info: ArtifactInfo, result: PortableResult, path: Path) -> None:
    """Write the file that another runtime loads."""
    program = _exported(model.eval().requires_grad_(False).to(result.device), info, result.device)
    if result.runtime == "onnx":
        return _write_onnx(program, info, path)
    if result.runtime == "program":
        return torch.export.save(program, path)
    try:  # With the threads of the machine where it runs, not those of this one.
        torch._inductor.aoti_compile_and_package(
            program, package_path=str(path), inductor_configs={"cpp.dynamic_threads": True})
    except Exception as error:
        raise UserError(f"torch cannot compile the model: {error}",
                        "name another C++ compiler in CXX") from error


def _exported(model: PortableModel, info: ArtifactInfo, device: str) -> torch.export.ExportedProgram:
    """Trace the model, with any number of rows and of ids."""
    examples, shapes, dims = [], [], {ROWS: torch.export.Dim(ROWS, min=1)}
    for one in inputs_of(info):
        word = str(one.shape[0])
        shapes.append({0: dims.setdefault(word, torch.export.Dim(word, min=0))})
        examples.append(torch.zeros(_EXAMPLE_SIZE, *one.shape[1:], dtype=getattr(torch, one.dtype), device=device))
    try:
        return torch.export.export(model, tuple(examples), dynamic_shapes=(tuple(shapes),), strict=False)
    except Exception as error:
        raise UserError(f"torch.export cannot trace {info.model.kind}: {error}",
                        "leave --format out, and use `embark serve`") from error


def _write_onnx(program: torch.export.ExportedProgram, info: ArtifactInfo, path: Path) -> None:
    try:
        torch.onnx.export(
            program, (), str(path), dynamo=True, verbose=False, input_names=[one.name for one in inputs_of(info)],
            output_names=[one.name for one in output_tensors(info)])
    except Exception as error:
        operator = re.search(r"op='([\w.]+)'", f"{error} {error.__cause__}")
        raise UserError(f"--format onnx: {operator[1] if operator else error} has no form in ONNX",
                        "--format aoti takes every operator of torch") from error


@contextmanager
def _quiet() -> Iterator[None]:
    """Leave out what torch's exporters log and warn of."""
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(action="ignore"):
            yield
    finally:
        logging.disable(logging.NOTSET)
