"""An AWS account: the real AWS CLI over moto, a stand-in of eksctl, and what EKS, FSx and EC2 refuse."""

from cloudsim.aws.account import open_account as open_account
