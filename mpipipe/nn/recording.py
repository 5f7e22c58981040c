"""Whether CUDA graphs can record what a stage does."""

from __future__ import annotations

from mpipipe.nn.stage import Stage


def unrecordable(stage: Stage) -> str:
    """Return why graphs cannot record the forward and backward of a stage, or "" where they can.

    A layer can be recorded if its own class says so: one that inherits from it may do other things.
    """
    for place, top in enumerate(stage.layers):
        for name, layer in top.walk(str(stage.first + place)):
            kind = type(layer)
            if not vars(kind).get("recordable", False):
                return f"layer {name} ({kind.__name__}) does not say that it can be recorded"
            reason = layer.unrecordable()
            if reason:
                return f"layer {name} ({kind.__name__}): {reason}"
    return ""
