"""How much of its files a rank reads, as the operating system counts it: its own tensors, and hardly more."""

from __future__ import annotations

from pathlib import Path

import pytest
from support import huggingface_reference as theirs

from mpipipe import Mesh, nn, schedules
from mpipipe.attention import Local
from mpipipe.language.models.huggingface.names import parts_of
from mpipipe.language.models.model_folder import open_on_all

IO = Path("/proc/self/io")
SIZES = {"vocab_size": 1000, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 6}


def bytes_read():
    """Bytes that this process has asked the system for so far."""
    return int(next(line for line in IO.read_text().splitlines() if "rchar" in line).split()[1])


@pytest.mark.skipif(not IO.exists(), reason="the system does not say how much a process reads")
@pytest.mark.parametrize("files", [1, 5])
@pytest.mark.parametrize("tied", [False, True])
def test_a_rank_reads_its_share_and_one_percent(comm, mpi_tmp_path, files, tied):
    folder = Path(mpi_tmp_path, "model")
    config = {**theirs.CONFIGS["llama"], **SIZES, "tie_word_embeddings": tied}
    tensors = theirs.tensors_of(config)
    if comm.rank == 0:
        theirs.write_folder(folder, config, tensors, files)
    comm.Barrier()
    found = open_on_all(comm, str(folder))
    with Mesh(comm, pipe=comm.size) as mesh:
        start, stop = schedules.partition(found.model.costs(), comm.size)[comm.rank]
        stage = nn.Stage(found.model.build(Local())[start:stop], first=start)
        own = {
            part.theirs for part in parts_of(found.folder.family.table, found.model) if part.ours in stage.parameters
        }
        if tied and "13.1.weight" in stage.parameters:
            own.add("model.embed_tokens.weight")
        share = sum(tensors[name].nbytes for name in own)
        comm.Barrier()
        before = bytes_read()
        found.load([stage], mesh)
        read = bytes_read() - before
    assert share <= read <= 1.01 * share + 4096  # and what the system's own files take, such as /proc/self/io
