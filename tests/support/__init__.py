"""What the tests share: the harness, references, tolerances, the emulated device."""
