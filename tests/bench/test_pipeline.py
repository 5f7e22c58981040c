"""bench pipeline: a line for each schedule, next to the step written by hand."""

from importlib.util import find_spec

import pytest

from mpipipe.bench import pipeline
from mpipipe.errors import ArgumentError


def test_a_line_for_each_schedule(comm, capsys):
    if comm.size != 2:
        with pytest.raises(ArgumentError, match="2 ranks"):
            pipeline.pipeline.__wrapped__(1)
        return
    pipeline.pipeline.__wrapped__(1)
    lines = capsys.readouterr().out.splitlines()
    names = ["pipeline one_f_one_b x 1", "pipeline interleaved_1f1b x 2"]
    if find_spec("torch"):
        names.append("pipeline of torch_stage")
    assert [line.split(":")[0] for line in lines] == names * (not comm.rank)
    assert all("by hand" in line and "; ratio " in line for line in lines)
