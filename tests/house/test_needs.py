"""The harness of conftest.py, run on a small suite of its own: with and without xdist, lenient and strict."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from limits import HANG_S

TESTS = Path(__file__).parents[1]

SUITE = """
import pytest

def test_plain():
    pass

@pytest.mark.needs("absent-tool")
def test_one():
    raise AssertionError("must not run")

@pytest.mark.needs("absent-tool")
def test_two():
    raise AssertionError("must not run")

@pytest.mark.needs("present-tool")
def test_present():
    pass
"""

INI = """
[pytest]
addopts = --strict-markers --import-mode=importlib -p no:cacheprovider
pythonpath = support
markers =
    gpu: x
    needs(tool): x
"""


@pytest.fixture
def suite(tmp_path: Path) -> Path:
    harness = (TESTS.parent / "conftest.py").read_text()
    assert '"/dev"' in harness
    (tmp_path / "conftest.py").write_text(harness.replace('"/dev"', repr(str(tmp_path / "dev"))))
    (tmp_path / "support").mkdir()
    table = (TESTS / "support" / "needs.py").read_text()
    extra = (
        'TOOLS["absent-tool"] = Tool((("no-such-program",),), ("absent-package",))\n'
        'TOOLS["present-tool"] = Tool((("sh",),), ("present-package",))\n\n\n'
    )
    (tmp_path / "support" / "needs.py").write_text(table.replace("def tools_used", extra + "def tools_used"))
    (tmp_path / "pytest.ini").write_text(INI)
    (tmp_path / "test_suite.py").write_text(SUITE)
    return tmp_path


def run_pytest(where: Path, *options: str, require_all: bool = False) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("COV", "PYTEST", "EMBARK_"))}
    env = environment | ({"EMBARK_REQUIRE_ALL": "1"} if require_all else {})
    # Only xdist of the installed plugins: the others would double the time and prove nothing here.
    env["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    command = [sys.executable, "-m", "pytest", "-p", "xdist", *options]
    return subprocess.run(command, cwd=where, env=env, capture_output=True, text=True, timeout=HANG_S)


def run_needs(where: Path, word: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "support/needs.py", word]
    return subprocess.run(command, cwd=where, capture_output=True, text=True, timeout=HANG_S)


def test_absent_tools_are_skipped_and_listed_with_the_line_that_gets_them(suite: Path):
    done = run_pytest(suite, "-rs")
    assert done.returncode == 0, done.stdout
    assert "2 passed, 2 skipped" in done.stdout
    assert "needs absent-tool: apt-get install -y absent-package" in done.stdout
    assert "not run here" in done.stdout
    assert "absent-tool: 2 tests; apt-get install -y absent-package" in done.stdout
    assert "present-tool" not in done.stdout


@pytest.mark.parametrize("options", [(), ("-n", "2")], ids=["one process", "xdist"])
def test_require_all_fails_the_session_where_a_tool_is_absent(suite: Path, options: tuple[str, ...]):
    """With xdist the workers' skips reach the session that counts."""
    done = run_pytest(suite, *options, require_all=True)
    assert done.returncode == 1, done.stdout
    assert "absent-tool: 2 tests; apt-get install -y absent-package" in done.stdout
    assert "only these may be skipped: gpu, schemas, x86_64" in done.stdout


def test_require_all_fails_on_any_other_skip_and_names_it(suite: Path):
    skips = {
        "test_body": "def test_a():\n    pytest.skip('for no reason')",
        "test_module": "pytest.skip('for no reason', allow_module_level=True)",
        "test_skipif": "@pytest.mark.skipif(True, reason='for no reason')\ndef test_a(): pass",
    }
    (suite / "test_suite.py").write_text("def test_plain(): pass\n")
    for name, source in skips.items():
        (suite / f"{name}.py").write_text(f"import pytest\n{source}\n")
    assert run_pytest(suite).returncode == 0
    done = run_pytest(suite, require_all=True)
    assert done.returncode == 1, done.stdout
    for name in skips:
        assert f"{name}.py" in done.stdout.partition("not run here")[2]
    assert done.stdout.count("for no reason") >= 3


def test_gpu_tests_run_where_there_is_a_gpu_and_only_there(suite: Path):
    source = "import pytest\n@pytest.mark.gpu\ndef test_a():\n    assert False\ndef test_plain(): pass\n"
    (suite / "test_suite.py").write_text(source)
    without = run_pytest(suite, require_all=True)
    assert without.returncode == 0, without.stdout
    assert "gpu: 1 test; an NVIDIA GPU" in without.stdout
    (suite / "dev").mkdir()
    (suite / "dev" / "nvidia0").touch()
    assert run_pytest(suite, require_all=True).returncode == 1


def test_an_expected_failure_is_not_a_skip(suite: Path):
    source = "import pytest\n@pytest.mark.xfail(strict=True)\ndef test_a():\n    assert False\n"
    (suite / "test_suite.py").write_text(source)
    assert run_pytest(suite, require_all=True).returncode == 0


def test_a_failing_suite_keeps_its_exit_code(suite: Path):
    (suite / "test_suite.py").write_text("def test_a():\n    assert False\n")
    assert run_pytest(suite, require_all=True).returncode == 1


def test_an_unknown_tool_is_refused_before_any_test_runs(suite: Path):
    (suite / "test_suite.py").write_text("import pytest\n@pytest.mark.needs('chromum')\ndef test_a(): pass\n")
    done = run_pytest(suite)
    assert done.returncode == 4, done.stdout
    assert "chromum" in done.stdout + done.stderr


def test_packages_are_those_the_tests_name_and_missing_those_absent(suite: Path):
    assert run_needs(suite, "packages").stdout.split() == ["absent-package", "present-package"]
    assert run_needs(suite, "missing").stdout.split() == ["absent-package"]


def test_a_tool_that_is_not_a_literal_of_the_table_is_refused_by_the_scan(suite: Path):
    (suite / "test_suite.py").write_text("import pytest\nX = 'sh'\n@pytest.mark.needs(X)\ndef test_a(): pass\n")
    done = run_needs(suite, "packages")
    assert done.returncode == 1
    assert "test_suite.py:3: needs(X)" in done.stderr


def test_this_suite_names_only_tools_of_the_table():
    done = subprocess.run([sys.executable, TESTS / "support" / "needs.py", "packages"], capture_output=True, text=True,
                          timeout=HANG_S)
    assert done.returncode == 0, done.stderr


def test_a_tool_of_npm_is_got_by_npm_and_npm_itself_by_apt(suite: Path):
    source = "import pytest\n@pytest.mark.needs('of-npm')\ndef test_a(): pass\n"
    (suite / "test_suite.py").write_text(source)
    table = (suite / "support" / "needs.py").read_text()
    extra = 'TOOLS["of-npm"] = Tool((("no-such-program",),), ("npm-package",), npm=("module@3",))\n'
    for has_npm in (True, False):
        found = f'_which = lambda name: "found" if name == "npm" and {has_npm} else None\n'
        changed = table.replace("def tools_used", extra + found + "\n\ndef tools_used")
        (suite / "support" / "needs.py").write_text(changed)
        assert run_needs(suite, "missing").stdout.split() == ([] if has_npm else ["npm-package"])
        assert run_needs(suite, "npm").stdout.split() == ["module@3"]
        how = "npm install -g module@3" if has_npm else "apt-get install -y npm-package && npm install -g module@3"
        assert f"of-npm: 1 test; {how}" in run_pytest(suite).stdout
