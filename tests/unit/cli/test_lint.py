"""`embark lint` as a person and a program see it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from embark.cli.console import Console
from embark.cli.lint import lint
from embark.errors import ExitCode, UserError
from embark.lint.rules import ALL_RULES

FIXTURES = Path(__file__).parents[3] / "tests" / "fixtures" / "lint"
GUIDE = FIXTURES / "guides" / "aws__option_b_using_kubeflow_training_operato.yaml"


@pytest.fixture(autouse=True)
def wide(monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")


@pytest.fixture
def guide(tmp_path):
    path = tmp_path / "job.yaml"
    shutil.copy(GUIDE, path)
    path.chmod(0o640)
    return path


def test_warnings_alone_do_not_fail(capsys):
    assert lint(FIXTURES / "accepted") == ExitCode.DONE
    assert "0 errors and" in capsys.readouterr().out


def test_clean_files_say_so(capsys):
    assert lint(FIXTURES / "good" / "trainjob.yaml") == ExitCode.DONE
    assert capsys.readouterr().out.strip() == "nothing found"


def test_quiet_says_the_result_alone(capsys, guide):
    lint(guide, console=Console(quiet=True))
    assert len(capsys.readouterr().out.splitlines()) == 1


def test_a_program_gets_json(capsys, guide):
    assert lint(guide, console=Console(json=True)) == ExitCode.OTHER
    answer = json.loads(capsys.readouterr().out)
    one = next(row for row in answer["findings"] if row["code"] == "EMB201")
    assert (one["line"], one["level"], one["can_fix"], one["path"]) == (17, "error", True, str(guide))
    assert one["source"].startswith("https://")
    assert answer["num_errors"] == sum(row["level"] == "error" for row in answer["findings"])


def test_a_fix_is_written_with_the_file_s_own_rights(capsys, guide):
    lint(guide, fix=True)
    assert "name: pytorch" in guide.read_text()
    assert guide.stat().st_mode & 0o777 == 0o640
    assert "fixed" in capsys.readouterr().out
    lint(guide, console=Console(json=True))
    assert "EMB201" not in [row["code"] for row in json.loads(capsys.readouterr().out)["findings"]]


def test_a_link_stays_a_link(tmp_path, guide):
    link = tmp_path / "link.yaml"
    link.symlink_to(guide)
    lint(link, fix=True, console=Console(quiet=True))
    assert link.is_symlink()
    assert "name: pytorch" in guide.read_text()


def test_a_fix_leaves_no_error_where_all_can_be_fixed(capsys, tmp_path):
    shutil.copy(FIXTURES / "faulty" / "scaled_by_half.yaml", tmp_path)
    assert lint(tmp_path) == ExitCode.OTHER
    assert lint(tmp_path, fix=True) == ExitCode.DONE
    assert lint(tmp_path) == ExitCode.DONE


@pytest.mark.parametrize(
    ("select", "ignore", "found"),
    [
        (("EMB201",), (), {"EMB201"}),
        (("container-not-pytorch",), (), {"EMB201"}),
        (("EMB2",), ("EMB20",), set()),
        (("emb20",), ("EMB201", "no-run-policy"), {"EMB202", "EMB203", "EMB205", "EMB206"}),
    ],
)
def test_rules_are_chosen_by_code_name_or_beginning(capsys, guide, select, ignore, found):
    lint(guide, select=select, ignore=ignore, console=Console(json=True))
    assert {row["code"] for row in json.loads(capsys.readouterr().out)["findings"]} == found


@pytest.mark.parametrize(
    ("paths", "options", "what"),
    [
        (["gone.yaml"], {}, "No such file"),
        ([], {}, "no file"),
        ([GUIDE], {"select": ["EMB999"]}, "no such rule"),
        ([GUIDE], {"ignore": ["container-not-pytorhc"]}, "container-not-pytorch"),
    ],
)
def test_a_mistake_of_the_user_is_reported_with_its_fix(paths, options, what):
    with pytest.raises(UserError) as error:
        lint(*map(Path, paths), **options)
    assert what in str(error.value)


def test_all_rules_can_be_listed(capsys):
    assert lint(rules=True, console=Console(json=True)) == ExitCode.DONE
    assert [row["code"] for row in json.loads(capsys.readouterr().out)] == [rule.code for rule in ALL_RULES]
