"""The programs every cloud needs: kubectl, helm, docker, torchx and sleep."""

from cloudsim.account import Account
from cloudsim.programs.docker import Docker
from cloudsim.programs.helm import Helm
from cloudsim.programs.kubectl import Kubectl
from cloudsim.programs.sleep import Sleep
from cloudsim.programs.torchx import TorchX


def add_common_programs(account: Account) -> None:
    account.add_programs([Kubectl(account), Helm(account), Docker(account), Sleep(account), TorchX(account)])
