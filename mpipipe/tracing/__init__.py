"""Where the time of recorded steps went, and what to change first; pictures of schedules."""

from mpipipe.tracing.recording import Recording, recording
from mpipipe.tracing.sheet import check_can_draw
from mpipipe.tracing.timeline import draw_memory, draw_timeline
from mpipipe.tracing.trace import Trace, check_new

__all__ = ["draw_memory", "draw_timeline", "recording"]
__dir__ = __all__.copy
