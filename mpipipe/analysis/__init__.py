"""Where the time of recorded steps went: which part of it, why, and what to change first."""

from mpipipe.analysis.efficiency import Efficiencies
from mpipipe.analysis.recording import Recording, recording
from mpipipe.analysis.trace import Trace, check_new
from mpipipe.analysis.written import WrittenTrace, number_in, read_trace

__all__ = ["Efficiencies", "Recording", "Trace", "WrittenTrace", "read_trace", "recording"]
