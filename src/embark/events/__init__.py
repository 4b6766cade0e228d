"""Events, the metrics they contain, and the sinks that show or send them. May import catalog, model and below.

The terminal view is not imported here: it needs rich, which most readers of events do not.
"""

from .events import Event, EventLog, Fanout, Sink, read_events
from .sharding import plan_text
from .sinks.tensorboard import TensorBoardSink

__all__ = ["Event", "EventLog", "Fanout", "Sink", "TensorBoardSink", "plan_text", "read_events"]
