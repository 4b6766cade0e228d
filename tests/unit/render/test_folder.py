"""Rendering into a folder that was rendered before: nothing hand-edited is lost, and everything is said."""

from __future__ import annotations

import os

import pytest

from embark.errors import UserError
from embark.render.folder import RECORD, SPEC, File, FolderSpec, compare, read_record, write
from embark.spec import RunSpec

FILES = [File("job.yaml", "a: 1\n"), File("bin/run.sh", "#!/bin/sh\n", is_executable=True)]


def of(folder, text="name = 'run'\n"):
    return FolderSpec(folder, RunSpec(), File(SPEC, text), origin=("quickstart",), settings=())


def states(found):
    return {one.path: one.state for one in found if one.path != SPEC}


def test_an_empty_folder_gets_everything_and_a_second_time_nothing_changes(tmp_path):
    assert write(of(tmp_path / "new"), compare(of(tmp_path / "new"), FILES), force=False) == []
    assert (tmp_path / "new/job.yaml").read_text() == "a: 1\n"
    assert os.access(tmp_path / "new/bin/run.sh", os.X_OK)
    assert set(states(compare(of(tmp_path / "new"), FILES)).values()) == {"same"}


def test_what_was_rendered_and_left_alone_is_rendered_again(tmp_path):
    write(of(tmp_path), compare(of(tmp_path), FILES), force=False)
    found = compare(of(tmp_path), [File("job.yaml", "a: 2\n"), FILES[1]])
    assert states(found) == {"job.yaml": "changed", "bin/run.sh": "same"}
    assert "-a: 1\n+a: 2\n" in found[1].diff
    write(of(tmp_path), found, force=False)
    assert (tmp_path / "job.yaml").read_text() == "a: 2\n"


def test_what_a_person_edited_is_stored_until_forced(tmp_path):
    write(of(tmp_path), compare(of(tmp_path), FILES), force=False)
    (tmp_path / "job.yaml").write_text("a: mine\n")
    found = compare(of(tmp_path), FILES)
    assert states(found)["job.yaml"] == "edited"
    assert [one.path for one in write(of(tmp_path), found, force=False)] == ["job.yaml"]
    assert (tmp_path / "job.yaml").read_text() == "a: mine\n"
    assert states(compare(of(tmp_path), FILES))["job.yaml"] == "edited"
    assert write(of(tmp_path), compare(of(tmp_path), FILES), force=True) == []
    assert (tmp_path / "job.yaml").read_text() == "a: 1\n"


def test_an_edit_that_is_what_would_be_rendered_is_no_edit(tmp_path):
    write(of(tmp_path), compare(of(tmp_path), FILES), force=False)
    (tmp_path / "job.yaml").write_text("a: 2\n")
    assert states(compare(of(tmp_path), [File("job.yaml", "a: 2\n")]))["job.yaml"] == "same"


def test_a_file_that_was_there_before_any_rendering_counts_as_edited(tmp_path):
    (tmp_path / "job.yaml").write_text("somebody else's\n")
    found = compare(of(tmp_path), FILES)
    assert states(found) == {"job.yaml": "edited", "bin/run.sh": "new"}
    write(of(tmp_path), found, force=False)
    assert (tmp_path / "job.yaml").read_text() == "somebody else's\n"


def test_what_is_no_longer_rendered_is_reported_and_left(tmp_path):
    write(of(tmp_path), compare(of(tmp_path), FILES), force=False)
    found = compare(of(tmp_path), FILES[:1])
    assert states(found) == {"job.yaml": "same", "bin/run.sh": "left over"}
    assert [one.path for one in write(of(tmp_path), found, force=True)] == ["bin/run.sh"]
    assert (tmp_path / "bin/run.sh").exists()


@pytest.mark.parametrize("text", ["", "not json", "[1]", '{"checksums": 7}',
                                  '{"spec": "run.toml", "origin": [], "checksums": []}'])
def test_a_damaged_record_makes_everything_that_differs_an_edit(tmp_path, text):
    write(of(tmp_path), compare(of(tmp_path), FILES), force=False)
    (tmp_path / RECORD).write_text(text)
    assert states(compare(of(tmp_path), [File("job.yaml", "a: 2\n")]))["job.yaml"] == "edited"


def test_the_record_holds_checksums_of_what_was_written(tmp_path):
    write(of(tmp_path), compare(of(tmp_path), FILES), force=False)
    record = read_record(tmp_path)
    assert set(record.checksums) == {SPEC, "job.yaml", "bin/run.sh"}
    assert (record.spec, record.origin) == (SPEC, ("quickstart",))


def test_a_file_that_is_neither_rendered_nor_there_is_forgotten(tmp_path):
    write(of(tmp_path), compare(of(tmp_path), FILES), force=False)
    (tmp_path / "bin/run.sh").unlink()
    write(of(tmp_path), compare(of(tmp_path), FILES[:1]), force=False)
    assert set(read_record(tmp_path).checksums) == {SPEC, "job.yaml"}


def test_an_edit_stays_an_edit_after_another_rendering(tmp_path):
    write(of(tmp_path), compare(of(tmp_path), FILES), force=False)
    (tmp_path / "job.yaml").write_text("a: mine\n")
    for text in ("a: 2\n", "a: 3\n"):
        found = compare(of(tmp_path), [File("job.yaml", text), FILES[1]])
        assert states(found)["job.yaml"] == "edited"
        write(of(tmp_path), found, force=False)
    (tmp_path / "job.yaml").write_text(FILES[0].text)  # as it was last rendered
    assert states(compare(of(tmp_path), [File("job.yaml", "a: 3\n"), FILES[1]]))["job.yaml"] == "changed"


def test_a_path_that_cannot_be_read_is_named(tmp_path):
    (tmp_path / "job.yaml").mkdir()
    with pytest.raises(UserError, match=r"job\.yaml: cannot be compared"):
        compare(of(tmp_path), FILES)


def test_a_changed_binary_file_is_replaced_and_not_recorded(tmp_path):
    """A package that is packed anew at each version: nobody edits it, and a committed record does not follow it."""
    wheel = File("dist/a.whl", data=b"PK\xff\xfe")
    write(of(tmp_path), compare(of(tmp_path), [wheel]), force=False)
    assert (tmp_path / "dist/a.whl").read_bytes() == b"PK\xff\xfe"
    assert states(compare(of(tmp_path), [wheel])) == {"dist/a.whl": "same"}
    assert set(read_record(tmp_path).checksums) == {SPEC}
    _, change = compare(of(tmp_path), [File("dist/a.whl", data=b"PK\xff\xfe\xff")])
    assert (change.state, change.diff) == ("changed", "dist/a.whl: 4 bytes there, 5 rendered; not text\n")
