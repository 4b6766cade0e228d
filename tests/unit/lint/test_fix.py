"""A fix changes what it names and nothing else, and never leaves a file that cannot be read."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from embark.kubernetes.yaml_nodes import SourceFile
from embark.lint.check import fix_paths, lint_paths, lint_texts, still_reads

FIXTURES = Path(__file__).parents[3] / "tests" / "fixtures" / "lint"
FILES = [path for group in ("guides", "accepted", "faulty") for path in sorted((FIXTURES / group).iterdir())]


def name_of(path):
    return f"{path.parent.name}/{path.name}"


def comments(text):
    return [line for line in text.splitlines() if line.lstrip().startswith("#")]


def fixed_text(tmp_path, name, text):
    path = tmp_path / name
    path.write_text(text)
    changes, left = fix_paths([path])
    return changes[0].new if changes else text, {one.code for one in left}


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_fixes_end_bring_no_new_error_hide_none_and_keep_comments(path):
    before = lint_paths([path])
    changes, left = fix_paths([path])
    assert not [one.code for one in left if one.can_fix]
    errors = {one.code for one in left if one.level == "error"}
    assert errors <= {one.code for one in before}
    lasting = {one.code for one in before if one.level == "error" and not one.can_fix}
    assert lasting <= {one.code for one in left}
    for change in changes:
        assert comments(change.new) == comments(change.path.read_text())


def test_nothing_is_written_by_looking(tmp_path):
    path = tmp_path / "x.yaml"
    shutil.copy(FIXTURES / "faulty" / "scaled_by_half.yaml", path)
    before = path.read_bytes()
    assert fix_paths([path])[0]
    assert path.read_bytes() == before


def test_nnodes_follows_parallelism_in_every_spelling(tmp_path):
    good = (FIXTURES / "good" / "job_eks_p4d.yaml").read_text()
    scaled = good.replace("completions: 2", "completions: 4").replace("parallelism: 2", "parallelism: 4  # four now")
    for spelling in ("--nnodes=2", "--nnodes 2"):
        text, left = fixed_text(tmp_path, "x.yaml", scaled.replace("--nnodes=2", spelling))
        assert text == scaled.replace("--nnodes=2", spelling[:-1] + "4")
        assert not left


def test_nnodes_as_a_word_of_its_own_is_fixed_text(tmp_path):
    text = (FIXTURES / "good" / "pytorchjob.yaml").read_text()
    listed = text.replace("[torchrun, -m,", '[torchrun, --nnodes, "3", -m,')
    fixed, left = fixed_text(tmp_path, "x.yaml", listed)
    assert fixed == text.replace("[torchrun, -m,", '[torchrun, --nnodes, "2", -m,')
    assert not left


def test_a_service_and_a_job_in_two_files_are_fixed_together(tmp_path):
    service, job = (FIXTURES / "good" / "job_eks_p4d.yaml").read_text().split("---\n")
    (tmp_path / "service.yaml").write_text(service.replace("  publishNotReadyAddresses: true\n", ""))
    (tmp_path / "job.yaml").write_text(job.replace("completionMode: Indexed\n  ", ""))
    changes, left = fix_paths([tmp_path])
    assert sorted(change.path.name for change in changes) == ["job.yaml", "service.yaml"]
    assert not left


def test_windows_line_ends_stay(tmp_path):
    path = tmp_path / "x.yaml"
    text = (FIXTURES / "faulty" / "gke_spot_grace.yaml").read_text().replace("\n", "\r\n")
    path.write_bytes(text.encode())
    change, = fix_paths([path])[0]
    assert change.new == text.replace("Seconds: 120", "Seconds: 15")


def test_a_broken_file_is_not_touched(tmp_path):
    path = tmp_path / "x.yaml"
    path.write_text((FIXTURES / "faulty" / "gke_spot_grace.yaml").read_text() + "---\na: [\n")
    changes, left = fix_paths([path])
    assert not changes
    assert {"EMB001", "EMB128"} == {one.code for one in left}


def test_a_change_that_breaks_the_file_is_seen():
    old = SourceFile.of(Path("x.yaml"), "a: 1\n---\nb: 2\n")
    assert still_reads(old, "a: 3\n---\nb: 2\n")
    assert not still_reads(old, "a: 3\nb: 2\n")
    assert not still_reads(old, "a: [\n---\nb: 2\n")
    assert not still_reads(SourceFile.of(Path("x.yaml"), "a: [\n"), "a: [\n")
    assert not still_reads(SourceFile.of(Path("x.py"), "a = 1\n"), "a = (\n")


def test_a_value_behind_an_anchor_is_left_alone(tmp_path):
    base = (FIXTURES / "good" / "kueue.yaml").read_text()
    text, left = fixed_text(tmp_path, "x.yaml", base.replace("kueue.x-k8s.io/v1beta2", "kueue.x-k8s.io/v1beta1"))
    assert text == base
    assert not left
    assert not lint_texts({"x.yaml": text})
