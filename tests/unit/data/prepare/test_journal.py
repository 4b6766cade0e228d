"""What is done is recorded atomically, and only resumed with the same settings."""

from __future__ import annotations

import pytest

from embark.data.prepare.journal import Journal
from embark.errors import UserError
from embark.store import open_store


def test_a_record_is_complete_or_not_there(tmp_path):
    with Journal(open_store(tmp_path)) as journal:
        assert journal.read("read/a") is None
        journal.write("read/a", {"rows": 3})
        assert journal.read("read/a") == {"rows": 3}
        assert [p.name for p in (tmp_path / ".preparing" / "read").iterdir()] == ["a.json"]


def test_other_settings_are_refused_and_named(tmp_path):
    settings = {"seed": 1, "prepare": {"dense": "log"}, "files": [{"uri": "a", "bytes": 5}]}
    with Journal(open_store(tmp_path)) as journal:
        journal.begin(settings)
        journal.begin(settings)
        with pytest.raises(UserError, match=r"seed was 1, is 2, files\[0\]\.bytes was 5, is 6") as caught:
            journal.begin(settings | {"seed": 2, "files": [{"uri": "a", "bytes": 6}]})
        assert "--fresh" in caught.value.fix


def test_two_at_once_are_refused(tmp_path):
    store = open_store(tmp_path)
    with Journal(store), pytest.raises(UserError, match="another process"), Journal(store):
        pass
    with Journal(store):
        pass
