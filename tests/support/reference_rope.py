"""Rotary frequencies one by one, as the papers and the published code of the models say it in words."""

import math

import numpy as np


def frequencies(head_dim, base, scaling=None):
    """(frequencies (head_dim / 2,), factor on cosine and sine)."""
    plain = [base ** (-2 * i / head_dim) for i in range(head_dim // 2)]
    if scaling is None:
        return np.array(plain), 1.0
    return BY_KIND[scaling.kind](plain, head_dim, base, scaling)


def _linear(plain, head_dim, base, scaling):
    """Positions are divided, which is the same as frequencies."""
    return np.array([f / scaling.factor for f in plain]), 1.0


def _llama3(plain, head_dim, base, scaling):
    """By wavelength against the first length: short ones stay, long ones are stretched, others are in between."""
    found = []
    for f in plain:
        wavelength = 2 * math.pi / f
        if wavelength < scaling.original_positions / scaling.high_freq_factor:
            found.append(f)
        elif wavelength > scaling.original_positions / scaling.low_freq_factor:
            found.append(f / scaling.factor)
        else:
            smooth = (scaling.original_positions / wavelength - scaling.low_freq_factor) / (
                scaling.high_freq_factor - scaling.low_freq_factor
            )
            found.append((1 - smooth) * f / scaling.factor + smooth * f)
    return np.array(found), 1.0


def _yarn(plain, head_dim, base, scaling):
    """A ramp over the pairs between those of beta_fast and of beta_slow turns within the first length."""
    ends = [
        head_dim * math.log(scaling.original_positions / (2 * math.pi * turns)) / (2 * math.log(base))
        for turns in (scaling.beta_fast, scaling.beta_slow)
    ]
    low, high = max(0, math.floor(ends[0])), min(head_dim - 1, math.ceil(ends[1]))
    found = []
    for i, f in enumerate(plain):
        if i <= low:
            part = 0.0
        elif i >= high:
            part = 1.0
        else:
            part = (i - low) / (high - low)
        found.append((1 - part) * f + part * f / scaling.factor)
    given = scaling.attention_factor
    return np.array(found), 1 + math.log(scaling.factor) / 10 if given is None else given


BY_KIND = {"linear": _linear, "llama3": _llama3, "yarn": _yarn}
