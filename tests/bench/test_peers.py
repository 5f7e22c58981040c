"""bench peers: both sides compute the same gradients, and a line is printed."""

import pytest

from mpipipe.errors import BackendError

pytestmark = pytest.mark.judges
SIZES = dict(dim=32, layers=3, heads=2, seq_len=16, microbatches=4, rows=2)


@pytest.fixture
def peers():
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    from mpipipe.bench import peers

    return peers


def test_a_pipeline_is_compared_with_pytorch(comm, peers, capsys):
    if comm.size == 1:
        with pytest.raises(BackendError, match=r"(?s)1 rank.*mpiexec -n 2"):
            peers.peers.__wrapped__(1, **SIZES)
        return
    peers.peers.__wrapped__(1, **SIZES)
    rows = [line.split(",")[0].split(" of ")[0] for line in capsys.readouterr().out.splitlines()]
    assert rows == ["torch_stage 1F1B", "memory"] * (not comm.rank)


def test_another_result_ends_the_comparison(comm, peers, monkeypatch):
    if comm.size == 1:
        return
    loss = peers.adapters.torch_loss
    monkeypatch.setattr(peers.adapters, "torch_loss", lambda mean: loss(lambda *pair: 2 * mean(*pair)))
    with pytest.raises(BackendError, match=r"gradient of torch_stage differs"):
        peers.peers.__wrapped__(1, **SIZES)
