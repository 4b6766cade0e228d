"""A misspelt name brings the name that was meant, by one rule for all commands."""

import pytest

from embark.errors import near_names, nearest


@pytest.mark.parametrize(("word", "known", "fix"), [
    ("trian", ("train", "plan"), "did you mean 'train'?"),
    ("P5.48XLARGE", ("p5.48xlarge", "p4d.24xlarge"), "did you mean 'p5.48xlarge'?"),
    ("tag", ("stages", "tags"), "did you mean 'tags'?"),
    ("rate", ("name", "learning_rate"), "did you mean 'learning_rate'?"),
    ("batch_size", ("watch", "train", "name"), "one of: name, train, watch"),
    ("x", ("box", "fox"), "one of: box, fox"),
])
def test_names_containing_the_word_come_before_similar_names(word, known, fix):
    assert nearest(word, known) == fix


def test_no_more_names_than_asked_for():
    assert near_names("us-west", ["us-west1", "us-west2", "us-east1", "us-west-2"], 2) == ["us-west1", "us-west2"]
