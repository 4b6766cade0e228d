"""Shell text and Dockerfiles are read as words and commands."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from embark.kubernetes.yaml_nodes import SourceFile
from embark.lint.pods import launch_of_text
from embark.lint.read import read_dockerfile
from embark.lint.shell import read_shell


def commands(text):
    return read_shell(SourceFile.of(Path("x.sh"), text))


def argvs(text):
    return [command.argv for command in commands(text)]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a b 'c d' \"e f\" g\\ h", [["a", "b", "c d", "e f", "g h"]]),
        ("a \\\n  b \\\r\n  c", [["a", "b", "c"]]),
        ("a; b && c || d | e &", [["a"], ["b"], ["c"], ["d"], ["e"]]),
        ("a # b\n# c\nd#e", [["a"], ["d#e"]]),
        ("if x; then y; else z; fi", [["x"], ["y"], ["z"]]),
        ("for i in 1 2; do a $i; done", [["i", "in", "1", "2"], ["a", "$i"]]),
        ("(a; b)", [["a"], ["b"]]),
        ("sudo -E env A=1 a", [["a"]]),
        ("run gcloud container clusters create a", [["gcloud", "container", "clusters", "create", "a"]]),
        ("run", [["run"]]),
        ("timeout 30 a b", [["a", "b"]]),
        ("a > out 2>&1 < in b", [["a", "b"]]),
        ("a 'it\nis' b", [["a", "it\nis", "b"]]),
        ("a \"$(b 'c)' d)\" e", [["a", "$(b 'c)' d)", "e"], ["b", "c)", "d"]]),
        ("a `b c`", [["a", "`b c`"], ["b", "c"]]),
        ("a ${B:-c d}", [["a", "${B:-c d}"]]),
        ("a 'open", [["a", "open"]]),
        ("a \"open", [["a", "open"]]),
        ("a $(open", [["a", "$(open"], ["ope"]]),
        ("", []),
    ],
)
def test_words_are_those_of_the_shell(text, expected):
    assert argvs(text) == expected


def test_what_a_command_sets_is_reported_apart():
    first, second = commands("A=1 B='x y' go z\nexport C=3 D\n")
    assert [(name, value) for name, value, _ in first.assignments] == [("A", "1"), ("B", "x y")]
    assert first.argv == ["go", "z"]
    assert [(name, value) for name, value, _ in second.assignments] == [("C", "3")]


def test_a_here_document_belongs_to_its_command_and_is_no_command():
    text = "cat <<'EOF' | kubectl apply -f - && echo ok\nkind: Job\nrm -rf /\nEOF\ntrue <<-X\n\tbody\n\tX\nlast\n"
    found = commands(text)
    assert [command.name for command in found] == ["cat", "kubectl", "echo", "true", "last"]
    assert found[0].document.text == "kind: Job\nrm -rf /\n"
    assert found[3].document.text == "\tbody\n"


def test_a_flag_s_value_stands_behind_it_or_in_it():
    command, = commands("gcloud --project p container clusters create x --num-nodes=3 --zone z --spot --flag --next")
    assert command.begins("gcloud container clusters create")
    assert not command.begins("gcloud compute")
    assert (command.flag("--num-nodes"), command.flag("--zone"), command.flag("--spot")) == ("3", "z", "")
    assert command.flag("--region") is None
    assert command.value_location("--zone").text == "z"


@settings(max_examples=100)
@given(words=st.lists(st.text(st.characters(blacklist_categories=("Cs", "Cc"), blacklist_characters="$`"), min_size=1),
                      min_size=1, max_size=6))
def test_what_shlex_quotes_is_read_back(words):
    text = shlex.join(["go", *words])
    assert argvs(text)[0] == shlex.split(text)


@pytest.mark.parametrize(
    ("text", "program", "options", "script"),
    [
        ("torchrun --nnodes=2 --nproc_per_node 8 train.py --nnodes 9", "torchrun",
         {"nnodes": "2", "nproc-per-node": "8"}, "train.py"),
        ("python -u -m torch.distributed.run --standalone -m pkg.mod", "torchrun", {"standalone": "true"}, "pkg.mod"),
        ("cd /x && source env.sh && exec torchrun -m a.b; echo done", "torchrun", {}, "a.b"),
        ("export PET_NNODES=4; torchrun x.py", "torchrun", {"nnodes": "4"}, "x.py"),
        ("python3 train.py --x", "python", {}, "train.py"),
        ("mpirun -n 8 thing", "mpirun", {}, ""),
    ],
)
def test_a_launcher_is_known_with_its_options(text, program, options, script):
    launch = launch_of_text(text)
    assert (launch.program, dict(launch.options), launch.script) == (program, options, script)


def test_a_dockerfile_is_read_by_instruction():
    text = ("ARG V=2.13\nFROM pytorch/pytorch:${V}-cuda AS base\nENV A=1 \\\n  # why\n  B='x y'\nENV OLD value here\n"
            "RUN --mount=type=cache,target=/c pip install a && \\\n    # note\n    pip install b\n"
            "RUN <<EOF\npip install c\nEOF\nRUN [\"pip\", \"install\", \"d\"]\nFROM base\nuser 7\n"
            "CMD [\"a b\", \"c\"]\n")
    dockerfile = read_dockerfile(SourceFile.of(Path("Dockerfile"), text))
    assert [image for image, _ in dockerfile.base_images()] == ["pytorch/pytorch:2.13-cuda"]
    assert [(name, value) for name, value, _ in dockerfile.environment] == [
        ("V", "2.13"), ("A", "1"), ("B", "x y"), ("OLD", "value here")]
    assert [command.argv[-1] for command in dockerfile.commands if command.name == "pip"] == ["a", "b", "c"]
    assert [one.name for one in dockerfile.last_stage] == ["FROM", "USER", "CMD"]
    assert dockerfile.last_stage[-1].words == ["a b", "c"]
