"""Any file can be given: what cannot be read is one finding, and nothing in it runs."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from embark.errors import UserError
from embark.kubernetes.yaml_nodes import MAX_DEPTH, SourceFile, read_yaml
from embark.lint.check import lint_paths, lint_texts
from embark.lint.read import MAX_BYTES, kind_of, read_files

NAMES = ("x.yaml", "x.sh", "Dockerfile", "x.py", "requirements.txt", "x.json")


def lint_text(name, text):
    return lint_texts({name: text})


def read(text):
    return read_yaml(SourceFile.of(Path("x.yaml"), text))


def findings_of(path):
    return [(one.code, one.what) for one in lint_paths([path])]


def test_every_node_knows_its_place():
    text = "# 😀 é\na: &x {b: 1}\nc:\n- d: 'two  words'\n  e: *x\n---\nf: |\n  long\n  text\n"
    (first, second), bad = read(text)
    assert bad is None
    assert first["c"].items[0]["d"].location.text == "'two  words'"
    assert first["c"].items[0]["d"].location.line == 4
    assert first["c"].items[0]["e"]["b"].value == 1
    assert second["f"].text == "long\ntext\n"
    assert second["f"].location.line == 7


@pytest.mark.parametrize(
    ("text", "value"),
    [("8", 8), ('"8"', "8"), ("0x10", 16), ("010", 8), ("0", 0), ("1_000", 1000), ("true", True), ("no", False),
     ("~", None), ("", None), ("1.5", 1.5), (".inf", float("inf")), ("8Gi", "8Gi"), ("9" * 30, "9" * 30)],
)
def test_a_scalar_has_the_value_that_kubernetes_sees(text, value):
    (root,), _ = read(f"a: {text}\n")
    assert root["a"].value == value
    assert type(root["a"].value) is type(value)


def test_what_a_mapping_says_itself_wins_over_what_is_merged_into_it():
    (root,), _ = read("base: &b {x: 1, y: 2}\na: {x: 3, <<: *b}\n")
    assert root["a"]["x"].value == 3
    assert root["a"]["y"].value == 2
    assert not root["a"].repeated


def test_a_missing_key_is_an_empty_node():
    (root,), _ = read("a: 1\n")
    assert not root.at("b.c.d")
    assert root.at("b.c.d").text == ""
    assert list(root["b"]) == []


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("a: [1", "flow sequence"),
        ("a: " + "[" * 100_000, f"deeper than {MAX_DEPTH}"),
        ("".join(f"{' ' * i}a:\n" for i in range(300)), f"deeper than {MAX_DEPTH}"),
        ("a: *nobody\n", "undefined alias"),
        ("a: &a [*a]\n", "inside what it names"),
        ("a: &a x\nb: [" + "*a, " * 1001 + "]\n", "aliases"),
        ("\tx: 1\n", "found character"),
        ("a: \x01\n", "not allowed"),
    ],
)
def test_yaml_that_cannot_be_read_says_why(text, what):
    _, bad = read(text)
    assert bad is not None
    assert what in bad.what


def test_documents_before_a_broken_one_are_still_looked_at(tmp_path):
    path = tmp_path / "x.yaml"
    path.write_text("kind: TrainJob\nmetadata: {name: x}\nspec: {podTemplateOverrides: []}\n---\na: [\n")
    assert {"EMB001", "EMB212"} <= {code for code, _ in findings_of(path)}


def test_a_bomb_of_aliases_takes_no_time(tmp_path):
    lines = ["a: &a [x, x, x, x, x, x, x, x, x]"]
    lines += [f"{chr(98 + i)}: &{chr(98 + i)} [{', '.join(['*' + chr(97 + i)] * 9)}]" for i in range(20)]
    path = tmp_path / "bomb.yaml"
    path.write_text("\n".join(lines) + "\n")
    assert findings_of(path) == []


def test_a_tag_does_not_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "x.yaml"
    path.write_text('a: !!python/object/apply:os.system ["touch ran"]\n')
    assert [code for code, _ in findings_of(path)] == ["EMB004"]
    assert not (tmp_path / "ran").exists()


def test_a_script_does_not_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("x.sh", "x.py", "Dockerfile"):
        (tmp_path / name).write_text("RUN touch ran\n" if name == "Dockerfile" else
                                     "import os\nos.system('touch ran')\n" if name == "x.py" else "$(touch ran)\n")
    lint_paths([tmp_path])
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("data", "what"),
    [(b"a: \xff\n", "not UTF-8: byte 0xff in line 1"), (b"\x00\x01", "binary"), (b"x" * (MAX_BYTES + 1), "MB")],
)
def test_what_is_no_text_is_one_finding(tmp_path, data, what):
    path = tmp_path / "x.yaml"
    path.write_bytes(data)
    (code, result), = findings_of(path)
    assert code == "EMB001"
    assert what in result


def test_a_huge_file_is_not_read(tmp_path):
    path = tmp_path / "x.yaml"
    with path.open("wb") as file:
        file.truncate(10 * 1024**3)
    (code, result), = findings_of(path)
    assert (code, "longer than 2 MB" in result) == ("EMB001", True)


def test_a_byte_order_mark_is_no_part_of_the_text(tmp_path):
    path = tmp_path / "x.sh"
    path.write_bytes(b"\xef\xbb\xbfgsutil ls\n")
    assert [code for code, _ in findings_of(path)] == ["EMB619"]


def test_a_missing_file_is_the_user_s_mistake(tmp_path):
    with pytest.raises(UserError, match="No such file"):
        lint_paths([tmp_path / "gone.yaml"])


def test_a_folder_s_files_are_those_of_known_kinds(tmp_path):
    for name in ("a.yaml", "deep/Dockerfile.gpu", "deep/run.sh", ".git/x.yaml", "README.md", "b.json", "x.bin"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("{}\n")
    names = {source.path.relative_to(tmp_path).as_posix() for source in read_files([tmp_path, tmp_path]).sources}
    assert names == {"a.yaml", "deep/Dockerfile.gpu", "deep/run.sh", "b.json"}


def test_a_file_without_a_suffix_is_known_by_its_first_line():
    assert kind_of(Path("run"), b"#!/usr/bin/env bash\n") == "shell"
    assert kind_of(Path("run"), b"#!/bin/sh\n") == "shell"
    assert kind_of(Path("run"), b"#!/usr/bin/python3\n") == "python"
    assert kind_of(Path("run"), b"hello") is None


@settings(max_examples=60)
@given(name=st.sampled_from(NAMES), text=st.text(max_size=300))
def test_any_text_is_read_without_a_traceback(name, text):
    assert all(one.what and 1 <= one.line <= text.count("\n") + 1 for one in lint_text(name, text))


PIECES = ("apiVersion: batch/v1\n", "kind: Job\n", "kind: TrainJob\n", "spec:\n", "  template: &t\n",
          "    spec: [*t]\n", "  parallelism: x\n", "- ", "{", "}", "metadata: 7\n", "    spec:\n",
          "      containers:\n", "      - 1\n",
          "      - env: 3\n", "        args: {a: b}\n", "        resources: []\n",
          "        command: [torchrun, --nnodes]\n",
          "---\n", "  pytorchReplicaSpecs: {Worker: {template: {spec: {containers: [{}]}}}}\n", "kind: PyTorchJob\n",
          "kind: JobSet\n", "  replicatedJobs: [{template: {spec: {template: {spec: {containers: x}}}}}]\n")


@settings(max_examples=60)
@given(pieces=st.lists(st.sampled_from(PIECES), max_size=14))
def test_objects_of_any_shape_are_looked_at_without_a_traceback(pieces):
    text = "".join(pieces)
    assert all(one.what and 1 <= one.line <= text.count("\n") + 1 for one in lint_text("x.yaml", text))
