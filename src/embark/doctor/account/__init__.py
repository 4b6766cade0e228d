"""Whether the cloud account can start the machines of a run: identity, quotas, machine types, budgets, bucket. Imports
as `doctor` does."""

from collections.abc import Iterator

from embark.doctor.account.need import Need, bucket_check, need_of
from embark.doctor.check import Check
from embark.launch.shell import Shell

__all__ = ["Need", "check_account", "need_of"]


def check_account(need: Need, shell: Shell) -> Iterator[Check]:
    """Each check as soon as it is known. The only change is one small file in the bucket, deleted at once."""
    if need.job.cloud == "aws":
        from embark.doctor.account.aws import check_aws

        checks = check_aws(need)
    elif need.job.cloud == "azure":
        from embark.doctor.account.azure import check_azure

        checks = check_azure(need, shell)
    else:
        from embark.doctor.account.gcp import check_gcp

        checks = check_gcp(need, shell)
    first = next(checks)
    yield first
    if first.verdict == "ok":  # without an identity nothing else can be asked
        yield from checks
        if (bucket := bucket_check(need.job.spec)) is not None:
            yield bucket
