"""Answers of the families of Hugging Face: greedy tokens of folders written by hand, against plain numpy."""

from __future__ import annotations

from functools import cache, partial

import numpy as np
import pytest
from support import huggingface_reference as reference

from mpipipe import Mesh, schedules
from mpipipe.language.inference.generation import Sampling, answers, build_decoder
from mpipipe.language.models.model_folder import open_on_all
from mpipipe.planning.layer_plan import LayerPlan

COUNT = 10
CUTS = [(1, 1), (2, 1), (4, 1), (1, 2), (2, 2), (1, 4)]  # pipe x seq
PROMPTS = [np.random.default_rng(length).integers(0, 48, length).tolist() for length in (3, 11, 1, 20)]


@cache
def greedy(family):
    """The answers by forwards of the whole sequence in numpy, and how much the likeliest token is ahead of the next."""
    config = reference.CONFIGS[family]
    tensors = reference.tensors_of(config)
    found, ahead = {}, np.inf
    for number, prompt in enumerate(PROMPTS):
        tokens = list(prompt)
        for _ in range(COUNT):
            logits = reference.logits(config, tensors, np.array([tokens]))[0, -1]
            second, first = np.sort(logits)[-2:]
            ahead = min(ahead, (first - second) / np.abs(logits).max())
            tokens.append(int(np.argmax(logits)))
        found[number] = tokens[len(prompt) :]
    return found, ahead


@pytest.mark.long
@pytest.mark.parametrize(("pipe", "seq"), CUTS)
@pytest.mark.parametrize("family", list(reference.CONFIGS))
def test_a_folder_of_each_family_continues_prompts_as_numpy_does(comm, mpi_tmp_path, family, pipe, seq):
    if comm.size % (pipe * seq):
        pytest.skip(f"needs a multiple of {pipe * seq} ranks")
    config = reference.CONFIGS[family]
    if comm.rank == 0:
        reference.write_folder(mpi_tmp_path / "model", config, reference.tensors_of(config), files=2)
    comm.Barrier()
    folder = open_on_all(comm, str(mpi_tmp_path / "model"))
    with Mesh(comm, pipe=pipe, seq=seq) as mesh:
        schedule = schedules.forward_only(pipe, 1, 3)
        plan = LayerPlan(schedule, schedules.partition(folder.model.costs(), pipe), rows=1)
        found = {number: [] for number in range(len(PROMPTS))}
        load = partial(folder.load, mesh=mesh)
        with build_decoder(folder.model, plan, mesh, "float64", 30, load, slots=3) as decoder:
            for drawn in answers(decoder, PROMPTS, COUNT, Sampling(temperature=0)):
                found[drawn.prompt].append(drawn.token)
    expected, ahead = greedy(family)
    assert ahead > 1e-9  # no rounding decides between two tokens
    assert found == expected
