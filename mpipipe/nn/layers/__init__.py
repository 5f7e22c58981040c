"""Layers: pairs of array functions, whose parameters live in the flat buffers of a stage."""
