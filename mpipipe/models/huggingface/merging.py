"""An adapter added to the matrices of the model that it was made for."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from mpipipe import arrays
from mpipipe.arrays import Array
from mpipipe.attention import Local
from mpipipe.models.gpt import GPT
from mpipipe.models.huggingface.adapter import AdapterFolder, adapter_parts, read_adapter
from mpipipe.models.huggingface.families import Family
from mpipipe.nn.layers.weight_gradients import LORA_A, LORA_B


def merge_adapter(folder: AdapterFolder, family: Family, model: GPT, parameters: Mapping[str, Array]) -> None:
    """Add (alpha / rank) B A to the matrices among these parameters, on the host or on a GPU.

    Raises what `read_adapter` does.
    """
    projections = {
        f"{name}.{target}": (f"{name}.{place.key}", place)
        for index, top in enumerate(model.build(Local()))
        for name, layer in top.walk(str(index))
        for target, place in layer.projections().items()
        if target in folder.lora.targets and f"{name}.{place.key}" in parameters
    }
    values = {
        part.ours: np.empty(part.shape, parameters[projections[owner][0]].dtype)
        for part in adapter_parts(folder.lora, family, model)
        if (owner := part.ours.rpartition(".")[0]) in projections
    }
    read_adapter(folder, family, model, values)
    for owner, (name, place) in projections.items():
        more = np.matmul(values[f"{owner}.{LORA_B}"] * folder.lora.scale, values[f"{owner}.{LORA_A}"])
        rows = parameters[name][place.start : place.stop]
        if arrays.is_device(rows):
            arrays.upload(arrays.download(rows) + more, out=rows)
        else:
            rows += more
