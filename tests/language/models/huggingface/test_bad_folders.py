"""Folders that are damaged, incomplete or of another model: one error on all ranks that names file and entry."""

from pathlib import Path

import numpy as np
import pytest
from support import huggingface_reference as theirs
from support.damage import flipped, on_bytes, on_json, on_tensors

from mpipipe import Mesh, nn, schedules
from mpipipe.attention import Local
from mpipipe.errors import ArgumentError
from mpipipe.language.models.model_folder import open_on_all

ONE, INDEX = "model.safetensors", "model.safetensors.index.json"
SECOND = "model-00002-of-00003.safetensors"


def pickled(folder):
    (folder / ONE).rename(folder / "pytorch_model.bin")


def zeros(folder):
    (folder / ONE).unlink()
    (folder / ONE).symlink_to("/dev/zero")


Q = "model.layers.1.self_attn.q_proj.weight"
DAMAGES = [
    (1, lambda folder: (folder / "config.json").unlink(), "config.json of a model folder cannot be read: No such"),
    (1, lambda folder: (folder / "config.json").write_text("[]"), "config.json of a model folder is no JSON object"),
    (1, on_json("config.json", lambda facts: facts.update(strange=1)), "option strange of a model folder is not known"),
    (1, on_json("config.json", lambda facts: facts.update(num_hidden_layers=4)), "no tensor model.layers.3.input"),
    (1, on_json("config.json", lambda facts: facts.update(num_hidden_layers=2)), "a tensor model.layers.2.* has not"),
    (1, on_json("config.json", lambda facts: facts.update(hidden_size=32)), r"model.embed_tokens.weight does not fit"),
    (1, lambda folder: (folder / ONE).unlink(), "no tensors that can be read\n  found: neither model.safetensors nor"),
    (1, pickled, r"pytorch_model.bin in .*: pickled objects.*\n.*\n  remedy: let the library that wrote it"),
    (1, on_bytes(ONE, lambda content: content[:-5]), rf"is damaged: .*\n  found: .*{ONE}"),
    (1, on_bytes(ONE, flipped(40)), "is damaged"),
    (1, on_tensors(ONE, lambda tensors: tensors.pop(Q)), f"has no tensor {Q}"),
    (1, on_tensors(ONE, lambda tensors: tensors.update(lora=np.zeros(1))), "has a tensor lora that the model has not"),
    (1, on_tensors(ONE, lambda tensors: tensors.update({Q: tensors[Q].T[:, 1:].copy()})),
     rf"{Q} does not fit the model\n  found: float64\[16, 15\] in .*{ONE}\n  expected: .*\[16, 16\]"),
    (1, on_tensors(ONE, lambda tensors: tensors.update({Q: tensors[Q].astype(np.int8)})), r"found: int8\[16, 16\]"),
    (1, zeros, "it is a character device"),
    (3, lambda folder: (folder / SECOND).unlink(), rf"cannot be read: No such .*\n  found: .*{SECOND}"),
    (3, on_bytes(SECOND, lambda content: content[:-1]), rf"is damaged: .*\n  found: .*{SECOND}"),
    (3, on_json(INDEX, lambda facts: facts.pop("weight_map")), f"{INDEX} of a model folder has no weight_map"),
    (3, on_json(INDEX, lambda facts: facts["weight_map"].update({Q: "../" + SECOND})), rf"found: {Q} in '../{SECOND}'"),
    (3, on_json(INDEX, lambda facts: facts["weight_map"].update({Q: "\0.safetensors"})), "no file has such a name"),
    (3, on_json(INDEX, lambda facts: facts["weight_map"].pop(Q)), f"has no tensor {Q}"),
]  # fmt: skip


@pytest.mark.parametrize(("files", "damage", "match"), DAMAGES, ids=[words[:40] for _, _, words in DAMAGES])
def test_every_rank_raises_the_error_that_names_file_and_entry(comm, mpi_tmp_path, files, damage, match):
    folder = Path(mpi_tmp_path, "model")
    if comm.rank == 0:
        config = theirs.CONFIGS["llama"]
        theirs.write_folder(folder, config, theirs.tensors_of(config), files)
        damage(folder)
    comm.Barrier()
    with Mesh(comm, pipe=comm.size) as mesh:
        with pytest.raises(ArgumentError, match=match) as caught:
            found = open_on_all(comm, str(folder))
            layers = found.model.build(Local())
            start, stop = schedules.partition(found.model.costs(), comm.size)[comm.rank]
            found.load([nn.Stage(layers[start:stop], dtype="float64", first=start)], mesh)
        assert len(set(comm.allgather(caught.value.message))) == 1
        assert str(folder) in str(caught.value)
