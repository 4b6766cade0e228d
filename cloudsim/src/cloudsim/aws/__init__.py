"""An AWS account: the real AWS CLI over moto, a stand-in for eksctl, and what EKS, FSx and EC2 refuse."""

from pathlib import Path

from cloudsim.aws import ec2, fsx, iam, sagemaker  # noqa: F401  Each registers the operations that it answers.
from cloudsim.aws.account import AwsAccount
from cloudsim.aws.cli import AwsCli
from cloudsim.aws.ecr import EcrRegistry
from cloudsim.aws.eksctl import Eksctl
from cloudsim.aws.machines import start_session
from cloudsim.programs import add_common_programs


def open_account(folder: Path) -> AwsAccount:
    """Open an empty account that is logged in and has quotas for anything."""
    account = AwsAccount(folder)
    account.registry = EcrRegistry(account)
    account.add_programs([AwsCli(account, start_session=start_session), Eksctl(account)])
    add_common_programs(account)
    return account
