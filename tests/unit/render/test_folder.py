"""Rendering into a folder that was rendered before: nothing hand-edited is lost, and everything is said."""

from __future__ import annotations

import json
import os

import pytest

from embark.errors import UserError
from embark.render.folder import RECORD, File, compare, write

FILES = [File("job.yaml", "a: 1\n"), File("bin/run.sh", "#!/bin/sh\n", is_executable=True)]


def states(found):
    return {one.path: one.state for one in found}


def test_an_empty_folder_gets_everything_and_a_second_time_nothing_changes(tmp_path):
    assert write(tmp_path / "new", compare(tmp_path / "new", FILES), force=False) == []
    assert (tmp_path / "new/job.yaml").read_text() == "a: 1\n"
    assert os.access(tmp_path / "new/bin/run.sh", os.X_OK)
    assert set(states(compare(tmp_path / "new", FILES)).values()) == {"same"}


def test_what_was_rendered_and_left_alone_is_rendered_again(tmp_path):
    write(tmp_path, compare(tmp_path, FILES), force=False)
    found = compare(tmp_path, [File("job.yaml", "a: 2\n"), FILES[1]])
    assert states(found) == {"job.yaml": "changed", "bin/run.sh": "same"}
    assert "-a: 1\n+a: 2\n" in found[0].diff
    write(tmp_path, found, force=False)
    assert (tmp_path / "job.yaml").read_text() == "a: 2\n"


def test_what_a_person_edited_is_stored_until_forced(tmp_path):
    write(tmp_path, compare(tmp_path, FILES), force=False)
    (tmp_path / "job.yaml").write_text("a: mine\n")
    found = compare(tmp_path, FILES)
    assert states(found)["job.yaml"] == "edited"
    assert [one.path for one in write(tmp_path, found, force=False)] == ["job.yaml"]
    assert (tmp_path / "job.yaml").read_text() == "a: mine\n"
    assert states(compare(tmp_path, FILES))["job.yaml"] == "edited"
    assert write(tmp_path, compare(tmp_path, FILES), force=True) == []
    assert (tmp_path / "job.yaml").read_text() == "a: 1\n"


def test_an_edit_that_is_what_would_be_rendered_is_no_edit(tmp_path):
    write(tmp_path, compare(tmp_path, FILES), force=False)
    (tmp_path / "job.yaml").write_text("a: 2\n")
    assert states(compare(tmp_path, [File("job.yaml", "a: 2\n")]))["job.yaml"] == "same"


def test_a_file_that_was_there_before_any_rendering_counts_as_edited(tmp_path):
    (tmp_path / "job.yaml").write_text("somebody else's\n")
    found = compare(tmp_path, FILES)
    assert states(found) == {"job.yaml": "edited", "bin/run.sh": "new"}
    write(tmp_path, found, force=False)
    assert (tmp_path / "job.yaml").read_text() == "somebody else's\n"


def test_what_is_no_longer_rendered_is_reported_and_left(tmp_path):
    write(tmp_path, compare(tmp_path, FILES), force=False)
    found = compare(tmp_path, FILES[:1])
    assert states(found) == {"job.yaml": "same", "bin/run.sh": "left over"}
    assert [one.path for one in write(tmp_path, found, force=True)] == ["bin/run.sh"]
    assert (tmp_path / "bin/run.sh").exists()


@pytest.mark.parametrize("text", ["", "not json", "[1]", '{"job.yaml": 7}'])
def test_a_damaged_record_makes_everything_that_differs_an_edit(tmp_path, text):
    write(tmp_path, compare(tmp_path, FILES), force=False)
    (tmp_path / RECORD).write_text(text)
    assert states(compare(tmp_path, [File("job.yaml", "a: 2\n")]))["job.yaml"] == "edited"


def test_the_record_holds_checksums_of_what_was_written(tmp_path):
    write(tmp_path, compare(tmp_path, FILES), force=False)
    assert set(json.loads((tmp_path / RECORD).read_text())) == {"job.yaml", "bin/run.sh"}


def test_a_path_that_cannot_be_read_is_named(tmp_path):
    (tmp_path / "job.yaml").mkdir()
    with pytest.raises(UserError, match=r"job\.yaml: cannot be compared"):
        compare(tmp_path, FILES)


def test_a_file_that_is_not_text_is_written_only_where_it_changed(tmp_path):
    wheel = File("dist/a.whl", data=b"PK\xff\xfe")
    write(tmp_path, compare(tmp_path, [wheel]), force=False)
    assert (tmp_path / "dist/a.whl").read_bytes() == b"PK\xff\xfe"
    assert states(compare(tmp_path, [wheel])) == {"dist/a.whl": "same"}
    (change,) = compare(tmp_path, [File("dist/a.whl", data=b"PK\xff\xfe\xff")])
    assert (change.state, change.diff) == ("changed", "dist/a.whl: 4 bytes there, 5 rendered; not text\n")
    (tmp_path / "dist/a.whl").write_bytes(b"\xffmine")
    assert states(compare(tmp_path, [wheel])) == {"dist/a.whl": "edited"}
