"""python -m mpipipe bench: measurements side by side with the bare thing, in one run. Ratios, not promises."""
