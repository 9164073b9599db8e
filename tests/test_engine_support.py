"""Models that cannot be served exactly are refused by name; their plain relatives are not."""

from __future__ import annotations

import json

import pytest
import tiny_models
import torch
import transformers
from tiny_models import build_config, build_network, one_thread, tokens_of  # noqa: F401

from engine.errors import InvalidRequest, UnsupportedModel
from engine.model import load_model, wrap_model
from engine.support import refuse_recipe, refuse_unsupported
from policies import make_recipe

SMALL = {
    "vocab_size": 96,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "factor": 2.0,
    "original_max_position_embeddings": 128,
    "short_factor": [1.0] * 6,
    "long_factor": [2.0] * 6,
}
MROPE = {"type": "mrope", "mrope_section": [2, 2, 2]}

REFUSED = [
    ("DeepseekV2Config", {}, "multi-head latent attention"),
    ("DeepseekV3Config", {}, "multi-head latent attention"),
    ("MiniCPM3Config", {}, "multi-head latent attention"),
    ("MambaConfig", {}, "linear_attention"),
    ("Mamba2Config", {}, "linear_attention"),
    ("JambaConfig", {}, "linear_attention"),
    ("BambaConfig", {}, "linear_attention"),
    ("Qwen3NextConfig", {}, "linear_attention"),
    ("FalconH1Config", {}, "hybrid"),
    ("Zamba2Config", {}, "hybrid"),
    ("RecurrentGemmaConfig", {}, "linear_attention"),
    ("GraniteMoeHybridConfig", {}, "linear_attention"),
    ("Lfm2Config", {**SMALL, "layer_types": ["conv", "full_attention"]}, "conv"),
    ("Qwen2VLConfig", {"text_config": {**SMALL, "rope_scaling": MROPE}}, "multimodal RoPE"),
    ("Qwen2_5_VLConfig", {"text_config": {**SMALL, "rope_scaling": MROPE}}, "multimodal RoPE"),
    ("Phi3Config", {**SMALL, "rope_parameters": LONGROPE}, "RoPE scaling longrope"),
    ("LlamaConfig", {**SMALL, "rope_scaling": {"type": "dynamic", "factor": 2.0}}, "RoPE scaling dynamic"),
    (
        "Gemma3TextConfig",
        {
            **SMALL,
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
                "full_attention": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e6},
            },
        },
        "RoPE scaling dynamic",
    ),
    ("Gemma3TextConfig", {**SMALL, "use_bidirectional_attention": True}, "bidirectional attention"),
    ("Llama4Config", {}, "chunked"),
    ("Llama4TextConfig", {}, "chunked"),
    ("Gemma4TextConfig", {"use_bidirectional_attention": "all"}, "bidirectional attention"),
    ("T5Config", {}, "encoder-decoder"),
    ("BartConfig", {}, "encoder-decoder"),
    ("FalconConfig", {"alibi": True}, "ALiBi"),
]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("name", "fields", "reason"), REFUSED)
def test_a_model_that_needs_more_is_refused_by_name(name, fields, reason):
    config = getattr(transformers, name)(**fields)
    with pytest.raises(UnsupportedModel, match=reason) as refusal:
        refuse_unsupported(config)
    assert config.model_type in str(refusal.value)


LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}


@pytest.mark.parametrize(
    "rope",
    [LLAMA3, YARN, {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}],
    ids=lambda r: r["rope_type"],
)
@pytest.mark.parametrize("field", ["rope_parameters", "rope_scaling"])
def test_fixed_rope_scalings_are_served_exactly(rope, field):
    network = build_network("llama", **{field: dict(rope)})
    truth = build_network("llama", **{field: dict(rope)})
    model = wrap_model(network, frozenset())
    text = tokens_of(90)
    done = tiny_models.prefill_all(model, [tiny_models.request("a", text[:80])], chunk=32)["a"]
    pool = tiny_models.new_pool(model)
    logits = tiny_models.decode_row(model, pool, tiny_models.join(pool, done), text[80:], 80)
    with torch.inference_mode():
        wanted = truth(input_ids=torch.tensor([text]), use_cache=False).logits[0, 80:]
    torch.testing.assert_close(logits, wanted, atol=1e-4, rtol=0)


@pytest.mark.parametrize("family", tiny_models.FAMILIES)
def test_served_families_are_not_refused(family):
    refuse_unsupported(build_config(family))


@pytest.mark.parametrize(
    "name",
    [
        "Qwen3MoeConfig",
        "MixtralConfig",
        "Olmo3Config",
        "Cohere2Config",
        "SmolLM3Config",
        "Gemma3nConfig",
        "Gemma4Config",
    ],
)
def test_plain_relatives_are_not_refused(name):
    refuse_unsupported(getattr(transformers, name)())


def from_config(name, **fields):
    config = getattr(transformers, name)(**{**SMALL, **fields})
    return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("DogeConfig", "an attention mask of its own"),
        ("DiffLlamaConfig", "attend more than once"),
        ("BertConfig", "bidirectional attention"),
        ("NemotronConfig", "passes no extra arguments"),
        ("StableLmConfig", "attention code of its own"),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_what_only_shows_when_the_model_runs_is_refused_too(name, reason):
    with pytest.raises(UnsupportedModel, match=reason):
        wrap_model(from_config(name), frozenset())


@pytest.mark.filterwarnings("ignore")
def test_a_folder_with_another_kind_of_model_is_refused(tmp_path):
    for name in ("ViTConfig", "CLIPConfig", "Qwen2VLConfig"):
        config = getattr(transformers, name)()
        (tmp_path / "config.json").write_text(json.dumps(config.to_dict(), default=str))
        with pytest.raises(UnsupportedModel, match=config.model_type):
            load_model(tmp_path)


SLOTS = {"policy": "full", "decode": {"rule": "streaming_llm", "budget": 64}, "positions": "slot"}
EXPECTED = {"policy": "expected_attention", "budget": 64}
CRITICAL = {"policy": "knorm", "budget": 64, "critical": True}


@pytest.mark.parametrize("fields", [SLOTS, EXPECTED, CRITICAL])
@pytest.mark.parametrize("family", tiny_models.FAMILIES)
def test_recipes_that_need_model_facts_are_served_where_the_model_has_them(family, fields):
    refuse_recipe(tiny_models.tiny(family).model.spec, make_recipe(**fields))


@pytest.mark.parametrize(
    ("fields", "field"), [(SLOTS, "kv.positions"), (EXPECTED, "kv.policy"), (CRITICAL, "kv.critical")]
)
def test_recipes_that_need_model_facts_are_refused_by_field_where_it_has_none(fields, field):
    spec = tiny_models.plain_spec([(2, 16, None), (2, 16, 20)])  # neither rotations nor output weights
    with pytest.raises(InvalidRequest, match=field) as refusal:
        refuse_recipe(spec, make_recipe(**fields))
    assert refusal.value.field == field


def test_recipes_are_not_refused_for_layers_they_do_not_select_in():
    spec = tiny_models.plain_spec([(2, 16, 20)])
    refuse_recipe(spec, make_recipe(**EXPECTED))
    refuse_recipe(spec, make_recipe(**CRITICAL))
    refuse_recipe(tiny_models.plain_spec([(2, 16, None)]), make_recipe(policy="snapkv", budget=64))
    with pytest.raises(InvalidRequest):
        refuse_recipe(spec, make_recipe(**SLOTS))
