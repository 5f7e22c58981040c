"""Whatever stands in a config.json or an index: a description, or an error of this package that names the option."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st
from support import huggingface_reference as theirs

from mpipipe.errors import ArgumentError
from mpipipe.language.models import GPT, huggingface
from mpipipe.language.models.huggingface.families import read_config

SCALINGS = [
    {"rope_type": kind, "factor": 2.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
     "original_max_position_embeddings": 8} for kind in ("linear", "llama3", "yarn", "default", "dynamic")
]  # fmt: skip
VALUES = st.one_of(
    st.none(), st.booleans(), st.integers(-2, 70), st.sampled_from([2**62, 2**70, -(2**70)]),
    st.floats(allow_nan=True), st.sampled_from(["", "silu", "gelu_new", "yarn", "full_attention", "1e-5", "llama"]),
    st.lists(st.sampled_from(["full_attention", "sliding_attention", 3, None]), max_size=4),
    st.dictionaries(st.sampled_from(["rope_type", "type", "factor", "rope_theta"]), st.integers(-1, 3), max_size=3),
    st.sampled_from(SCALINGS),
)  # fmt: skip
KEYS = [
    *sorted({key for config in theirs.CONFIGS.values() for key in config}),
    "rope_scaling", "rope_parameters", "layer_types", "use_sliding_window", "max_window_layers", "attention_bias",
    "mlp_bias", "tie_word_embeddings", "n_inner", "head_dim", "partial_rotary_factor", "quantization_config", "unheard",
]  # fmt: skip


@settings(max_examples=150)
@given(st.sampled_from(sorted(theirs.CONFIGS)), st.dictionaries(st.sampled_from(KEYS), VALUES, min_size=1, max_size=3))
def test_any_options_give_a_description_or_an_error(family, changes):
    try:
        fields = read_config({**theirs.CONFIGS[family], **changes}, Path("config.json"))[1]
        model = GPT(**fields)
    except ArgumentError as error:
        event("refused")
        assert str(error)
        return
    event("described")
    assert "unheard" not in changes and model.layers >= 1


@settings(max_examples=60)
@given(VALUES | st.dictionaries(st.sampled_from(["model.norm.weight", "x", ""]), VALUES, max_size=3))
def test_any_index_gives_an_error(tmp_path_factory, value):
    config = theirs.CONFIGS["llama"]
    folder = theirs.write_folder(tmp_path_factory.mktemp("any"), config, {}, files=2)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": value}))
    with pytest.raises(ArgumentError):
        huggingface.open_folder(folder)
