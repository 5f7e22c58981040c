"""The arithmetic on the host, with numpy: `any_dtype` for every dtype, `full_precision` for float32 and float64."""
