"""A lazy module answers TorchRec with stand-ins, and is the module itself as soon as anything of it is used."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from embark.trainers.torch import lazy_imports
from embark.trainers.torch.lazy_imports import is_loaded

Run = Callable[..., dict[str, Any]]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    """Run code as a module of TorchRec, beside a lazy package `heavy` with a submodule."""
    (tmp_path / "heavy").mkdir()
    (tmp_path / "heavy" / "__init__.py").write_text(
        "from heavy import part\nclass Thing: size = 3\ndef ask(x): return 'asked'\nother = 7\n")
    (tmp_path / "heavy" / "part.py").write_text("runs = globals().get('runs', 0) + 1\nvalue = 5\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(lazy_imports, "CLASSES", {"heavy": {"Thing": "heavy"}})
    monkeypatch.setattr(lazy_imports, "ANSWERS", {"heavy": {"ask": lazy_imports._if_plain(bool)}})
    monkeypatch.setattr(lazy_imports, "LAZY", {"heavy"})

    def run(code: str, importer: str = "torchrec.distributed") -> dict[str, Any]:
        names: dict[str, Any] = {"__name__": importer}
        exec(code, names)
        return names

    yield run
    for name in ("heavy", "heavy.part"):
        sys.modules.pop(name, None)


def test_a_class_for_isinstance_does_not_run_the_module(run: Run):
    names = run("from heavy import Thing\nfrom typing import Optional\nseen = Optional[Thing], isinstance(3, Thing)")
    assert names["seen"][1] is False
    assert not is_loaded("heavy")


def test_a_stand_in_becomes_the_class_when_it_is_used(run: Run):
    names = run("from heavy import Thing\nmade = Thing()\nclass Mine(Thing): pass")
    real = sys.modules["heavy"].Thing
    assert type(names["made"]) is real
    assert names["Mine"].__mro__[1] is real
    assert isinstance(names["made"], names["Thing"])
    assert issubclass(names["Mine"], names["Thing"])
    assert names["Thing"].size == 3


def test_a_function_answers_plain_values_alone(run: Run):
    names = run("from heavy import ask\nplain = ask(True), ask(False)")
    assert names["plain"] == (True, False)
    assert not is_loaded("heavy")
    assert names["ask"]("a symbol") == "asked"
    assert is_loaded("heavy")


@pytest.mark.parametrize("code", ["import heavy\nfound = heavy.other", "from heavy import other as found"])
def test_any_other_name_runs_the_module_in_place(run: Run, code: str):
    before = run("import heavy")["heavy"]
    assert not is_loaded("heavy")
    assert run(code)["found"] == 7
    assert sys.modules["heavy"] is before


@pytest.mark.parametrize("code", ["import heavy.part", "from heavy.part import value"])
def test_a_submodule_runs_once_and_after_its_package(run: Run, code: str):
    run("import heavy")
    run(code)
    assert is_loaded("heavy")
    assert sys.modules["heavy"].part is sys.modules["heavy.part"]
    assert sys.modules["heavy.part"].runs == 1


def test_other_importers_get_the_class_itself(run: Run):
    assert run("from heavy import Thing", importer="my_model")["Thing"] is sys.modules["heavy"].Thing
