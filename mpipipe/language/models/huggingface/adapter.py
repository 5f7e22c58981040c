"""Low-rank adapters as the library PEFT has them in folders, and which parameters they are.

adapter_model.safetensors has base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight (r,
inputs) and such of lora_B (outputs, r). The rows of B are those of the matrix that it is added to,
so for queries and keys they are turned as in `names`. Options of adapter_config.json that change
the result are refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from mpipipe import nn
from mpipipe.arrays import Array
from mpipipe.checkpoint import replacing, write_tensors
from mpipipe.comm import Mesh
from mpipipe.errors import ArgumentError, ConfigError
from mpipipe.job import group_of
from mpipipe.language.models.gpt import GPT
from mpipipe.language.models.huggingface.families import Family, expressed
from mpipipe.language.models.huggingface.folder import Origin, opened
from mpipipe.language.models.huggingface.names import Tensor, parts_of
from mpipipe.language.models.huggingface.options import Options, read_json
from mpipipe.language.models.huggingface.reading import copy_to, host_for, read_part
from mpipipe.language.models.huggingface.writing import METADATA, converted, explained, write_json
from mpipipe.nn import LORA_A, LORA_B
from mpipipe.options import Values
from mpipipe.text import counted

ADAPTER_CONFIG = "adapter_config.json"
TENSORS = "adapter_model.safetensors"
PREFIX = "base_model.model."
# what says where an adapter comes from, how it was trained, or how often; not what it computes
WITHOUT_EFFECT = (
    "base_model_name_or_path",
    "revision",
    "auto_mapping",
    "inference_mode",
    "peft_version",
    "task_type",
    "peft_type",
    "lora_dropout",
    "megatron_core",
    "qalora_group_size",
    "fan_in_fan_out",
    "layers_pattern",
    "runtime_config",
)
NONE = (
    "alora_invocation_tokens",
    "arrow_config",
    "corda_config",
    "eva_config",
    "exclude_modules",
    "kasa_config",
    "layer_replication",
    "layers_to_transform",
    "lora_ga_config",
    "megatron_config",
    "modules_to_save",
    "monteclora_config",
    "target_parameters",
    "trainable_token_indices",
    "use_bdlora",
    "velora_config",
)
OFF = ("ensure_weight_tying", "lora_bias", "use_dora", "use_qalora", "use_rslora")
EMPTY = ("alpha_pattern", "loftq_config", "rank_pattern")
REMEDY = "take the adapter that was made for this model, or the model that it was made for"


@dataclass(frozen=True)
class AdapterFolder:
    """An adapter in a folder: plain data, which can be sent to other ranks."""

    path: Path
    lora: nn.LoRA


def open_adapter(path: Path) -> AdapterFolder:
    """Read adapter_config.json. Raises ConfigError, which names file and option."""
    place = path / ADAPTER_CONFIG
    options = Options(read_json(place, "name the folder of an adapter that PEFT has saved"), place)
    options.only("peft_type", "LORA")
    options.only("task_type", "CAUSAL_LM", None)
    rank = options.count("r")
    alpha = options.number("lora_alpha")
    targets = options.take("target_modules")
    if not isinstance(targets, list) or not targets or not all(map(_is_name, targets)):
        raise options.error("target_modules", "a list of names of modules, such as q_proj")
    options.only("bias", "none")
    # Other starts change the matrices of the model.
    options.only("init_lora_weights", True, False, "gaussian", None)
    for keys, allowed in ((NONE, [None]), (OFF, [False]), (EMPTY, [{}, None])):
        for key in keys:
            options.only(key, *allowed)
    options.ignore(WITHOUT_EFFECT)
    options.finish("LoRA")
    return AdapterFolder(path, nn.LoRA(rank, alpha, sorted(targets)))


def _is_name(name: object) -> bool:
    return isinstance(name, str) and "." not in name


def config_of(lora: nn.LoRA, family: Family, base: str | None) -> Values:
    """Return adapter_config.json."""
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": lora.rank,
        "lora_alpha": int(lora.alpha) if float(lora.alpha).is_integer() else lora.alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": sorted(lora.targets),
        "fan_in_fan_out": family.name == "gpt2",  # its matrices lie the other way round
        "use_rslora": False,
        "use_dora": False,
        "modules_to_save": None,
        "init_lora_weights": True,
        "inference_mode": True,
    }


def adapter_parts(lora: nn.LoRA, family: Family, model: GPT) -> list[Tensor]:
    """Return PEFT's tensors of an adapter of this model.

    Raises ConfigError for a target that the family does not have.
    """
    missing = set(lora.targets)
    parts = []
    for tensor in parts_of(family.table, model):
        module, _, kind = tensor.theirs.rpartition(".")
        target = module.rpartition(".")[2]
        if kind != "weight" or target not in lora.targets:
            continue
        missing.discard(target)
        layer = tensor.ours.rpartition(".")[0]
        # Rows of B are rows of the matrix, and turned as these are.
        for name, form in ((LORA_A, "plain"), (LORA_B, tensor.form)):
            stored = f"{PREFIX}{module}.{name}.weight"
            ours = f"{layer}.{target}.{name}"
            if form != "turned":
                form = "plain"
            parts.append(Tensor(stored, tensor.place, ours, form=form))
    if missing:
        raise ConfigError(
            f"{family.architecture} has no module {sorted(missing)[0]}",
            found=f"targets {', '.join(lora.targets)}",
            expected="names of its projections",
            remedy=REMEDY,
        )
    return parts


def read_adapter(
    folder: AdapterFolder, family: Family, model: GPT, parameters: Mapping[str, Array]
) -> None:
    """Set those of these parameters that belong to the adapter, on the host or on a GPU."""
    parts = adapter_parts(folder.lora, family, model)
    with opened(folder.path / TENSORS) as file:
        strange = sorted(set(file.arrays) - {part.theirs for part in parts})
        if strange:
            raise ArgumentError(
                f"the adapter has a tensor {strange[0]} that does not belong to the model",
                found=f"{len(strange)} such tensors in {file.path}",
                expected=f"those of {family.architecture} with {counted(model.layers, 'layer')}, "
                "for the targets of its config",
                remedy=REMEDY,
            )
        for part in parts:
            if part.ours in parameters:
                target = parameters[part.ours]
                host = host_for(target)
                read_part(file, part.theirs, part, host, model, " of an adapter", REMEDY)
                copy_to([target], host)


def save_adapter(
    target: Path,
    lora: nn.LoRA,
    model: GPT,
    parameters: Mapping[str, Array],
    mesh: Mesh,
    origin: Origin,
) -> None:
    """Write the folder of an adapter from the ranks' parameters; collective.

    Adapters are small: the ranks of a pipeline gather them, and rank 0 writes the file. A folder
    that is there goes when the new one is whole.
    """
    group = group_of(mesh.comm)
    tensors = {}
    with group.raise_together("saving an adapter: its parts"):
        family, _ = expressed(model, origin.family)
        parts = adapter_parts(lora, family, model)
        for part in parts:
            if part.ours in parameters:
                array = parameters[part.ours]
                values = converted(part, array, array.dtype, model)
                tensors[part.theirs] = values.reshape(array.shape)
    everyone = group_of(mesh.pipe).gather("saving an adapter: its tensors", tensors)
    with replacing(target, group, explained) as unnamed:
        with group.raise_together("saving an adapter: its files"), explained(target):
            if mesh.rank == 0:
                for of_rank in everyone:
                    tensors.update(of_rank)
                unnamed.mkdir(parents=True, exist_ok=True)
                ordered = {part.theirs: tensors[part.theirs] for part in parts}
                write_tensors(unnamed / TENSORS, ordered, metadata=METADATA)
                base = None
                if origin.path is not None:
                    base = str(origin.path)
                write_json(unnamed / ADAPTER_CONFIG, config_of(lora, family, base))
