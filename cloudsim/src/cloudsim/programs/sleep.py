"""`sleep`: the clock advances, and nobody waits."""

from cloudsim.account import Account, AnsweredBy, Call
from cloudsim.state import Refused

LIMIT_S = 72 * 3600.0
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}


class Sleep:
    """A script that waits for ever is stopped after three days of the clock."""

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
                raise Refused(f"sleep: invalid time interval ‘{word}’") from None
        if self._account.clock.now > LIMIT_S:
            raise Refused("sleep: stopped: the script has waited for three days of the account's clock")
        return ""
