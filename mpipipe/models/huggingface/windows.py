"""Which layers have a sliding window, and how wide it is: from config.json, and back.

A window of w positions ends with the query's own, in their convention as in ours.
"""

from __future__ import annotations

from typing import Any

from mpipipe.models.huggingface.options import Options

Windows = tuple[int | None, ...] | None
KINDS = {"sliding_attention": True, "full_attention": False}  # of layer_types


def read_one_window(options: Options, layers: int, default: int | None) -> Windows:
    """Read `sliding_window` of families in which all layers have the same one."""
    window = options.count("sliding_window", None) if "sliding_window" in options.values else default
    return None if window is None else (window,) * layers


def read_layer_windows(options: Options, layers: int) -> Windows:
    """Read the windows of families that choose them by layer, with `layer_types` or `max_window_layers`."""
    used = options.flag("use_sliding_window", False)
    window = options.count("sliding_window", None) if "sliding_window" in options.values else 4096
    first = options.take("max_window_layers")
    if first is not None and (type(first) is not int or first < 0):
        raise options.error("max_window_layers", "an integer of at least 0")
    types = options.take("layer_types")
    if types is not None:
        known = isinstance(types, list) and all(isinstance(kind, str) and kind in KINDS for kind in types)
        if not known or len(types) != layers:
            raise options.error("layer_types", f"a list of {layers} of {' and '.join(KINDS)}")
        slides = [KINDS[kind] for kind in types]
    else:
        slides = [layer >= (28 if first is None else first) for layer in range(layers)]
    if types is not None and any(slides) and (not used or window is None):
        raise options.error("layer_types", "full_attention alone, where use_sliding_window is false")
    if not used or window is None or not any(slides):
        return None
    return tuple(window if slide else None for slide in slides)


def layer_window_options(windows: Windows) -> dict[str, Any]:
    """Return the options that `read_layer_windows` reads."""
    widths = {width for width in windows or () if width is not None}
    if not widths:
        return {"use_sliding_window": False, "sliding_window": None}
    names = {slides: name for name, slides in KINDS.items()}
    assert windows is not None
    return {
        "use_sliding_window": True,
        "sliding_window": widths.pop(),
        "max_window_layers": next(place for place, width in enumerate(windows) if width is not None),
        "layer_types": [names[width is not None] for width in windows],
    }
