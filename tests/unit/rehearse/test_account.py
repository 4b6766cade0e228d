"""`embark rehearse --account` without the simulated accounts."""

import sys

import pytest

from embark.errors import MissingPackage
from embark.rehearse.account import rehearse_account


def test_a_missing_cloudsim_is_named_with_its_fix(monkeypatch):
    importer = "embark.rehearse.account_scripts"
    for name in [name for name in sys.modules if name.partition(".")[0] == "cloudsim" or name == importer]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "cloudsim", None)
    with pytest.raises(MissingPackage, match="needs cloudsim") as error:
        rehearse_account("quickstart", (), lambda step: None)
    assert error.value.fix == "pip install 'embark-rec[account]'"
