"""What the tests of plain machines share."""

import pytest

from embark.launch.backends.vm import Vm


@pytest.fixture
def vm_home(tmp_path, monkeypatch):
    """A registry of its own, nothing set by the user's environment, and no waiting."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.setenv("COLUMNS", "200")
    for name in ("AMI", "RESOURCE_GROUP", "VM_IMAGE", "EMBARK_SSH_FROM", "PROJECT", "NETWORK", "IMAGE_FAMILY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SUBNET_ID", "subnet-1")
    monkeypatch.setattr("time.sleep", lambda _: None)
    monkeypatch.setattr(Vm, "boot_s", 1.0)
    monkeypatch.setattr(Vm, "poll_s", 0.0)
