"""Lines of `kubectl logs --timestamps`, each once, however often the log is opened again."""

import time
from dataclasses import dataclass

from embark.launch.backend import LogLine, split_rank_prefix, time_ns
from embark.launch.backends.kubernetes.status import Pod


@dataclass(slots=True)
class PodLogPosition:
    """How far a pod's log was read: its last line's time, and how many lines had that time."""

    last_ns: int = 0
    num_at_last: int = 0
    to_skip: int = 0
    """Lines of `last_ns` that opening it again repeats."""

    def begin(self) -> str:
        """For `--since-time`, which has whole seconds, so that some lines are repeated."""
        self.to_skip = self.num_at_last
        return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(self.last_ns // 1_000_000_000)) if self.last_ns else ""

    def parse(self, pod: Pod, text: str) -> LogLine | None:
        """None: read before."""
        stamp, _, rest = text.partition(" ")
        at_ns = time_ns(stamp)
        if not self._is_new(at_ns):
            return None
        return split_rank_prefix(LogLine(at_ns, pod.name, rest if at_ns else text, pod.index))

    def _is_new(self, at_ns: int) -> bool:
        if not at_ns or at_ns > self.last_ns:
            self.last_ns, self.num_at_last, self.to_skip = at_ns or self.last_ns, 1, 0
            return True
        if at_ns < self.last_ns:
            return False
        if self.to_skip:
            self.to_skip -= 1
            return False
        self.num_at_last += 1
        return True
