"""Adapters against PEFT: the same logits and gradients, and folders that both sides read."""

from pathlib import Path

import numpy as np
import pytest
from support import transformers_judge as judge
from support.harness import on_rank_0
from support.tolerance import close, largest

from mpipipe import Mesh, nn
from mpipipe.attention import Local
from mpipipe.language.models import huggingface
from mpipipe.language.models.huggingface.adapter import adapter_parts, open_adapter, read_adapter, save_adapter
from mpipipe.language.models.huggingface.names import view

pytestmark = pytest.mark.judges
OPERATIONS = 4000  # through three blocks and back, over 24 rows
TARGETS = {
    "Llama 3": [["q_proj", "v_proj"], ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]],
    "Qwen3": [["k_proj", "down_proj"]],
    "GPT-2": [["c_attn"], ["c_attn", "c_proj", "c_fc"]],
}
CASES = [(family, targets) for family, several in TARGETS.items() for targets in several]
IDS, TARGET = judge.tokens(length=12), judge.tokens(length=12, seed=2)


@pytest.fixture(scope="module")
def torch():
    pytest.importorskip("peft")
    return pytest.importorskip("torch")


def judged(torch, family, targets, folder):
    """A model in float64 with adapters that are not neutral; the plain model is saved in a folder."""
    import peft

    with judge.in_float64(family):
        model = judge.make(family, "float64")
    model.save_pretrained(folder)
    with_adapters = peft.get_peft_model(
        model, peft.LoraConfig(r=3, lora_alpha=6, target_modules=targets, task_type="CAUSAL_LM"),
        autocast_adapter_dtype=False,
    )  # fmt: skip
    for name, parameter in with_adapters.named_parameters():
        if "lora_" in name:
            parameter.data = torch.randn(parameter.shape, dtype=torch.float64) * 0.2
    return with_adapters.eval()


def stage_of(folder, adapter=None, lora=None, seed=0):
    found = huggingface.open_folder(folder)
    opened = None if adapter is None else open_adapter(adapter)
    lora = opened.lora if opened is not None else lora
    stage = nn.Stage(lora.apply(found.model.build(Local())), "float64", seed=seed)
    parameters = dict(stage.parameters.items())
    huggingface.read(found, {name: array for name, array in parameters.items() if "lora_" not in name})
    if opened is not None:
        read_adapter(opened, found.family, found.model, parameters)
    stage.refresh()
    return found, lora, stage


@pytest.mark.parametrize("family, targets", CASES)
def test_logits_and_gradients_equal_those_of_peft(torch, tmp_path, family, targets):
    theirs = judged(torch, family, targets, tmp_path / "model")
    theirs.save_pretrained(tmp_path / "adapter")
    found, lora, stage = stage_of(tmp_path / "model", tmp_path / "adapter")
    with judge.in_float64(family):
        logits = theirs(torch.tensor(IDS)).logits
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), torch.tensor(TARGET).flatten()).backward()
    y, saved = stage.forward(IDS)
    expected = logits.detach().numpy()
    close(y, expected, OPERATIONS, largest(expected) * 4)
    _, dlogits = nn.softmax_cross_entropy(y, TARGET)
    stage.backward(dlogits, saved)
    parameters, seen = dict(theirs.named_parameters()), set()
    for part in adapter_parts(lora, found.family, found.model):
        gradient = parameters[part.theirs.replace(".weight", ".default.weight")].grad.numpy()
        ours = view(part, stage.gradients[part.ours], found.model).reshape(gradient.shape)
        assert np.abs(ours - gradient).max() <= 1e-9, part.theirs
        close(ours, gradient, OPERATIONS, 4 * largest(gradient), what=part.theirs)
        seen.add(part.ours)
    assert seen == set(stage.gradients), "each trained parameter has been compared"


@pytest.mark.parametrize("family, targets", CASES)
def test_peft_opens_the_folder_of_an_adapter(torch, comm, mpi_tmp_path, family, targets):
    import peft
    import transformers

    folder, adapter = Path(mpi_tmp_path, "model"), Path(mpi_tmp_path, "adapter")
    on_rank_0(comm, judged, torch, family, targets, folder)
    found, lora, stage = stage_of(folder, lora=nn.LoRA(2, 5.0, targets))
    for name in stage.gradients:
        stage.parameters[name][...] = np.random.default_rng(len(name)).standard_normal(stage.parameters[name].shape)
    stage.refresh()
    with Mesh(comm, pipe=1) as mesh:
        own = dict(stage.parameters.items())
        save_adapter(adapter, lora, found.model, own, mesh, huggingface.Origin.of(folder))
    with judge.in_float64(family):
        model = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float64, attn_implementation="eager"
        )
    theirs = peft.PeftModel.from_pretrained(model, adapter, autocast_adapter_dtype=False).eval()
    with torch.no_grad(), judge.in_float64(family):
        expected = theirs(torch.tensor(IDS)).logits.numpy()
    close(stage.forward(IDS)[0], expected, OPERATIONS, largest(expected) * 4)
    theirs.save_pretrained(adapter.with_name(f"again{comm.rank}"))
    _, _, again = stage_of(folder, adapter.with_name(f"again{comm.rank}"), seed=3)
    for name in stage.gradients:
        assert again.parameters[name].tobytes() == stage.parameters[name].tobytes(), name
