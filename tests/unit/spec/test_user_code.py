"""Files of the user's own code: read with the spec, checked without running them, told by file and line."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from embark.errors import SpecError, UserError
from embark.spec import load_spec, resolve, to_toml
from embark.spec.user_code import load_user_class, location_of, user_error, with_code

KIND = "my_model:MyModel"


def written(tmp_path, code: str | None, name: str = "my_model.py"):
    (tmp_path / "run.toml").write_text(f'[model]\nnum_dense = 2\nkind = "{KIND}"\n')
    if code is not None:
        (tmp_path / name).write_text(code)
    return str(tmp_path / "run.toml")


def test_code_beside_the_spec_travels_with_it_and_does_not_run(tmp_path):
    code = "open('ran', 'w')\nrows = [\n    1,\n]\nclass MyModel: pass\n"
    spec = load_spec(written(tmp_path, code))
    assert (spec.model.code, spec.model.is_custom, (tmp_path / "ran").exists()) == (code, True, False)
    (tmp_path / "my_model.py").unlink()
    (tmp_path / "elsewhere.toml").write_text(to_toml(spec, only_set=True))
    assert load_spec(str(tmp_path / "elsewhere.toml")).model == spec.model


@settings(max_examples=25, deadline=None)
@given(st.text(st.characters(exclude_characters="\r", exclude_categories=("Cs",)), min_size=1, max_size=60))
def test_any_text_survives_the_way_through_toml(code):
    import tomllib

    spec = resolve({"model": {"kind": KIND, "code": code}})
    assert tomllib.loads(to_toml(spec))["model"]["code"] == code


@pytest.mark.parametrize(("code", "expected"), [
    (None, "my_model.py does not exist"),
    ("class MyModel(:\n", "my_model.py:1: invalid syntax"),
    ("import os\n\nclass MyModle: pass\n", "did you mean 'MyModle'?"),
    ("import os\n", "write class MyModel in it"),
    ("\0", "my_model.py:1:"),
])
def test_a_mistake_in_a_code_file_is_reported_with_its_line(tmp_path, code, expected):
    with pytest.raises(SpecError) as raised:
        load_spec(written(tmp_path, code))
    assert "run.toml:3: model.kind" in str(raised.value)
    assert expected in str(raised.value)


@pytest.mark.parametrize("code", ["from layers import MyModel", "from layers import *", "MyModel = make()",
                                  "if True:\n    class MyModel: pass", "from layers import Other as MyModel"])
def test_a_class_may_come_from_anywhere(tmp_path, code):
    assert load_spec(written(tmp_path, code)).model.code == code


def test_a_byte_order_mark_is_not_part_of_the_text(tmp_path):
    assert load_spec(written(tmp_path, "\ufeffclass MyModel: pass\n")).model.code == "class MyModel: pass\n"


def test_code_without_a_kind_that_names_it_is_a_mistake(tmp_path):
    with pytest.raises(SpecError, match=r'has no effect while model\.kind is "dlrm"'):
        with_code(resolve({"model": {"code": "x = 1"}}), tmp_path)


def test_errors_are_told_by_the_line_of_the_user_s_file_that_raised_them():
    code = "import json\n\nclass MyModel:\n    def __init__(self):\n        json.loads('{')\n"
    with pytest.raises(ValueError, match="Expecting") as raised:
        load_user_class(KIND, code)()
    error = user_error(raised.value)
    assert isinstance(error, UserError)
    assert error.what.startswith("my_model.py:5: JSONDecodeError in __init__: Expecting property name")
    assert error.fix == "correct this line of my_model.py: json.loads('{')"
    with pytest.raises(ModuleNotFoundError) as missing:
        load_user_class(KIND, "x = 1\nimport nowhere_at_all\n")
    assert user_error(missing.value).what == "my_model.py:2: ModuleNotFoundError: No module named 'nowhere_at_all'"
    with pytest.raises(ValueError, match="invalid literal") as ours:
        int("x")
    assert user_error(ours.value) is None


def test_an_exit_while_the_file_is_loaded_is_an_error_of_its_line():
    with pytest.raises(UserError, match=r"my_model.py:2: SystemExit: 0"):
        load_user_class(KIND, "import sys\nsys.exit(0)\n")


def test_what_has_no_line_is_told_by_its_file():
    code = "import functools\nclass MyModel:\n    rows = functools.partial(print)\n    {}\n"
    made = code.format("@functools.lru_cache\n    def other(self): pass")
    assert location_of(load_user_class(KIND, made).other) == "my_model.py:4"
    assert location_of(load_user_class(KIND, made).rows).endswith("functools.py")


def test_a_name_that_is_no_class_is_refused():
    with pytest.raises(UserError, match=r"my_model.py: MyModel is not a class"):
        load_user_class(KIND, "MyModel = 3")


def test_dataclasses_with_deferred_annotations_work_in_it():
    code = ("from __future__ import annotations\nfrom dataclasses import dataclass\n"
            "@dataclass\nclass MyModel:\n    a: int\n")
    assert load_user_class(KIND, code)(3).a == 3
