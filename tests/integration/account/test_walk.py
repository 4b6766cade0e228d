"""A walk of a guide that never ends says so, and what it waited for, before pytest ends its worker."""

from __future__ import annotations

import sys
import time

import pytest
from integration.account.guide import Block, WarmSession, walk


@pytest.mark.slow
def test_a_block_that_never_ends_names_its_command_and_the_account_s(tmp_path):
    account = tmp_path / "account"
    account.mkdir()
    with WarmSession("gcp", account, sys.executable) as session:
        session._until_s = time.monotonic() + 10.0
        with pytest.raises(AssertionError, match=r"line 7 \(Watch\) ended with 124") as told:
            walk(session, [Block("tail -f /dev/null", 7, "Watch")], tmp_path, skips={})
    assert "tail -f /dev/null waits for ever" in str(told.value)
    assert "in serve_forever" in str(told.value), "where the account's server stands"
