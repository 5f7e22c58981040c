"""Pictures of schedules and of measured time as PNG or SVG, by matplotlib (extra `[plot]`). No MPI."""

from mpipipe.pictures.comparison import draw_comparison, simulate_all
from mpipipe.pictures.ratios import draw_ratios
from mpipipe.pictures.sheet import check_can_draw
from mpipipe.pictures.split import draw_split
from mpipipe.pictures.timeline import Measured, draw_memory, draw_timeline

__all__ = [
    "Measured",
    "check_can_draw",
    "draw_comparison",
    "draw_memory",
    "draw_ratios",
    "draw_split",
    "draw_timeline",
    "simulate_all",
]
