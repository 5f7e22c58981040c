"""Where the time of recorded steps went: which part of it, why, and what to change first."""

from mpipipe.analysis.efficiency import Efficiencies
from mpipipe.analysis.exports import library as library
from mpipipe.analysis.recording import Recording, recording
from mpipipe.analysis.trace import Trace
from mpipipe.analysis.trace import check_new as check_new
from mpipipe.analysis.written import WrittenTrace, read_trace
from mpipipe.analysis.written import number_in as number_in

__all__ = ["Efficiencies", "Recording", "Trace", "WrittenTrace", "read_trace", "recording"]
