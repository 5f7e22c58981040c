"""bench peers: both sides compute the same gradients, and a line is printed."""

import pytest

from mpipipe.errors import BackendError

pytestmark = pytest.mark.judges


@pytest.fixture
def peers():
    pytest.importorskip("torch")
    from mpipipe.bench import peers

    return peers


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_pipeline_is_compared_with_pytorch(comm, peers, capsys, dtype):
    sizes = dict(dim=32, layers=3, heads=2, seq_len=16, microbatches=4, rows=2)
    if comm.size == 1:
        with pytest.raises(BackendError, match=r"(?s)1 rank.*mpiexec -n 2"):
            peers.peers.__wrapped__(1, **sizes)
        return
    peers.peers.__wrapped__(1, **sizes, dtype=dtype)
    lines = capsys.readouterr().out.splitlines()
    rows = [line.split(",")[0].split(" of ")[0] for line in lines if not line.startswith("torch_stage")]
    assert rows == ["pipeline 1F1B", "memory"] * (not comm.rank)


def test_another_result_ends_the_comparison(comm, peers, monkeypatch):
    if comm.size == 1:
        return
    monkeypatch.setattr(peers, "_as_pytorch", lambda model, name, array: array)  # pairs stay neighbours
    with pytest.raises(BackendError, match=r"gradient of the pipeline differs"):
        peers.peers.__wrapped__(1, dim=32, layers=2, heads=2, seq_len=16, rows=2)
