"""What is done is recorded atomically, and only resumed with the same settings."""

from __future__ import annotations

import pytest

from embark.data.prepare.tasks import Journal
from embark.errors import UserError


def test_a_record_is_complete_or_not_there(tmp_path):
    with Journal(tmp_path) as journal:
        assert journal.read("read/a") is None
        journal.write("read/a", {"rows": 3})
        assert journal.read("read/a") == {"rows": 3}
        assert [p.name for p in (journal.directory / "read").iterdir()] == ["a.json"]


def test_other_settings_are_refused_and_named(tmp_path):
    settings = {"seed": 1, "prepare": {"dense": "log"}, "files": [{"uri": "a", "bytes": 5}]}
    with Journal(tmp_path) as journal:
        journal.begin(settings)
        journal.begin(settings)
        with pytest.raises(UserError, match=r"seed was 1, is 2, files\[0\]\.bytes was 5, is 6") as caught:
            journal.begin(settings | {"seed": 2, "files": [{"uri": "a", "bytes": 6}]})
        assert "--fresh" in caught.value.fix


def test_two_at_once_are_refused(tmp_path):
    with Journal(tmp_path), pytest.raises(UserError, match="another process"), Journal(tmp_path):
        pass
    with Journal(tmp_path):
        pass
