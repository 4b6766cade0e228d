"""A finding that is meant as it is can be told so in the file."""

from __future__ import annotations

import pytest

from embark.lint.check import lint_texts

SCRIPT = "#!/bin/bash\nset -e\n{above}gsutil cp a gs://b/{behind}\n"


def lint_text(name, text):
    return lint_texts({name: text})


def codes(above="", behind=""):
    return {one.code for one in lint_text("copy.sh", SCRIPT.format(above=above, behind=behind))}


def test_without_a_comment_it_is_found():
    assert codes()


@pytest.mark.parametrize("place", ["above", "behind", "two above"])
def test_a_comment_with_its_code_silences_it(place):
    comment = "# embark-lint: ignore " + " ".join(sorted(codes())) + ": an old machine"
    assert not codes(**{
        "above": {"above": comment + "\n"}, "behind": {"behind": "  " + comment},
        "two above": {"above": comment + "\n# and more of why\n"},
    }[place])


@pytest.mark.parametrize("comment", ["# embark-lint: ignore EMB999\n", "# embark-lint: ignore\n", "# ignore\n",
                                     "# embark-lint: ignore EMB999\n\n"])
def test_another_code_or_no_code_silences_nothing(comment):
    assert codes(above=comment) == codes()


def test_a_comment_that_is_not_right_above_silences_nothing():
    assert codes(above="# embark-lint: ignore " + " ".join(codes()) + "\n\n") == codes()
