"""Small trainings on tokens, and folders to begin from."""

from pathlib import Path

import numpy as np
import pytest
from support import huggingface_reference as theirs
from support.harness import on_rank_0

from mpipipe.language import data
from mpipipe.train import TrainConfig


@pytest.fixture
def source():
    """Tokens below 48, for training and validation."""
    tokens = np.random.default_rng(0).integers(0, 48, 3000)
    return data.Source.of_arrays(tokens[:2500], tokens[2500:], vocab=48)


@pytest.fixture
def chosen(comm, mpi_tmp_path):
    """chosen(name, **keys): the configuration of a small training that leaves the folder of this name."""

    def make(name="run", **keys):
        small = dict(
            out=str(Path(mpi_tmp_path, name)), seq_len=8, batch=4, microbatches=2, steps=2, warmup=1, lr=1e-3,
            eval_batches=1, sample_bytes=0, device="cpu", dtype="float64", pipe=comm.size,
        )  # fmt: skip
        return TrainConfig(**{**small, **keys})

    return make


@pytest.fixture
def folder(comm, mpi_tmp_path):
    """folder(family, **options): the folder of a model of that family, written by hand, and its configuration."""

    def make(family="llama", **options):
        config = {**theirs.CONFIGS[family], **options}
        on_rank_0(comm, theirs.write_folder, Path(mpi_tmp_path, "source"), config, theirs.tensors_of(config))
        return Path(mpi_tmp_path, "source"), config

    return make
