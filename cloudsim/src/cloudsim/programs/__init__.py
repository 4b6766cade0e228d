"""The programs that every cloud needs: kubectl, helm, docker, torchx and sleep."""

from cloudsim.account import Account, AnsweredBy, Call
from cloudsim.programs.docker import Docker
from cloudsim.programs.helm import Helm
from cloudsim.programs.kubectl import Kubectl
from cloudsim.programs.torchx import TorchX
from cloudsim.state import Refusal

LIMIT_S = 72 * 3600.0
QUIET_S = 5 * 3600.0  # Longer than the scripts wait for anything: a queue may hold a job back for four hours.
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}


class Sleep:
    """Advances the clock instead of waiting, and stops a script that waits for something that never comes."""

    name = "sleep"
    answered_by: AnsweredBy = "stand-in"

    def __init__(self, account: Account) -> None:
        self._account = account

    def run(self, call: Call) -> str:
        for word in call.words:
            unit = word[-1:] if word[-1:] in _UNITS else "s"
            try:
                self._account.clock.advance(float(word.rstrip("smhd")) * _UNITS[unit])
            except ValueError:
                raise Refusal(f"sleep: invalid time interval ‘{word}’") from None
        if self._account.quiet_s() > QUIET_S:
            raise Refusal(f"sleep: stopped: nothing in the account has changed for {QUIET_S / 3600:g} hours, and "
                          "nothing will")
        if self._account.clock.now > LIMIT_S:
            raise Refusal("sleep: stopped: the script has waited for three days of the account's clock")
        return ""


def add_common_programs(account: Account) -> None:
    account.add_programs([Kubectl(account), Helm(account), Docker(account), Sleep(account), TorchX(account)])
