"""The programs every cloud needs: kubectl, helm, docker, torchx and sleep."""

from embark.rehearse.account.account import Account
from embark.rehearse.account.programs.docker import Docker
from embark.rehearse.account.programs.helm import Helm
from embark.rehearse.account.programs.kubectl import Kubectl
from embark.rehearse.account.programs.sleep import Sleep
from embark.rehearse.account.programs.torchx import TorchX


def add_common_programs(account: Account) -> None:
    account.add_programs([Kubectl(account), Helm(account), Docker(account), Sleep(account), TorchX(account)])
