"""Whole jobs that go wrong, as a table of cases and one runner: see fault.py, cases/ and play.py."""
