"""All that can be asked of the account a run would be paid by."""

from __future__ import annotations

from collections.abc import Iterator

from embark.doctor.account.need import Need
from embark.doctor.check import Check
from embark.launch.shell import Shell


def examine_account(need: Need, shell: Shell) -> Iterator[Check]:
    """Each as soon as it is known. Nothing is changed but for one small file, which goes again."""
    if need.job.cloud == "aws":
        from embark.doctor.account.aws import aws_account

        yield from aws_account(need)
    elif need.job.cloud == "azure":
        from embark.doctor.account.azure import azure_account

        yield from azure_account(need, shell)
    else:
        from embark.doctor.account.gcp import gcp_account

        yield from gcp_account(need, shell)
