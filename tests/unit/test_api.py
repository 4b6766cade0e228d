"""The public Python API: every name resolves and is typed, and returns what the commands print."""

from __future__ import annotations

import ast
import inspect
import json
import re
from pathlib import Path

import pytest

import embark
from embark.__main__ import run
from embark.errors import UserError
from embark.events.events import to_jsonable
from embark.lint import rendered
from embark.render.folder import File

GUIDE = Path(__file__).parents[2] / "docs" / "start" / "python-api.md"


@pytest.mark.parametrize("name", embark.__all__)
def test_every_public_name_resolves_is_documented_and_typed(name):
    value = getattr(embark, name)
    assert value.__doc__
    assert f"`{name}" in GUIDE.read_text()
    if inspect.isfunction(value):
        signature = inspect.signature(value)
        annotations = [signature.return_annotation, *(one.annotation for one in signature.parameters.values())]
        assert inspect.Signature.empty not in annotations


def test_no_public_name_is_a_package_s_own():
    """`import embark.plan` would replace a function of that name."""
    packages = {path.parent.name for path in Path(embark.__file__).parent.glob("*/__init__.py")}
    assert not packages & set(embark.__all__)
    assert set(embark.__all__) <= set(dir(embark))
    with pytest.raises(AttributeError, match="nothing_like_it"):
        _ = embark.nothing_like_it


def test_a_plan_is_what_the_command_prints(capsys):
    spec = embark.load_spec("criteo-1tb", ["place.machine=p4d.24xlarge"])
    assert run(["plan", "criteo-1tb", "--set", "place.machine=p4d.24xlarge", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads(json.dumps(to_jsonable(embark.plan_run(spec).to_dict())))


def test_rendered_files_are_linted(monkeypatch):
    spec = embark.load_spec("quickstart", ["place.machine=p5.48xlarge", "store.root=s3://bucket/runs"])
    assert "kubernetes_job.yaml" in {file.path for file in embark.render_files(spec)}
    monkeypatch.setattr(rendered, "render", lambda job: [File("job.yaml", "kind: Job\nspec: [\n")])
    with pytest.raises(UserError, match=r"job\.yaml:3: EMB001"):
        embark.render_files(spec)


def test_data_of_another_kind_is_not_prepared(tmp_path):
    spec = embark.load_spec("laptop", ["data.prepare.input=clicks.csv"])
    with pytest.raises(UserError, match=r"data\.kind is 'synthetic'") as caught:
        embark.prepare_data(spec, tmp_path / "out")
    assert 'data.kind = "prepared"' in caught.value.fix
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("as_given", [str, Path, lambda path: [str(path)], lambda path: [path]])
def test_one_path_or_several_are_linted_fixed_and_diagnosed(tmp_path, as_given):
    manifest, log = tmp_path / "bad.yaml", tmp_path / "train.log"
    manifest.write_text("kind: Job\nkind: Job\n")
    log.write_text("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB\n")
    for fix in (False, True):
        assert "EMB003" in {one.code for one in embark.lint_files(as_given(manifest), fix=fix).findings}
    assert [one.code for one in embark.diagnose_run(as_given(log)).diagnoses] == ["EMD101"]


def test_the_guide_s_example_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for code in re.findall(r"```python\n(.*?)```", GUIDE.read_text(), re.DOTALL):
        exec(compile(code, str(GUIDE), "exec"), {})
    assert "committed" in capsys.readouterr().out


def test_the_stub_names_the_same_functions():
    stub = Path(embark.__file__).with_suffix(".pyi").read_text()
    names = ast.literal_eval(re.search(r"__all__ = (\[.*?\])", stub, re.DOTALL)[1])
    assert set(names) == set(embark.__all__)
    imported = {(alias.asname or alias.name): f"{node.module}:{alias.name}"
                for node in ast.walk(ast.parse(stub)) if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert imported == {name: f"embark.{location}" for name, location in embark._LOCATIONS.items()}
