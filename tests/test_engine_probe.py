"""What the probe finds: caches that layers share, rotations that hold, and output projections."""

from __future__ import annotations

import copy

import pytest
import tiny_models
import torch
import transformers
from tiny_models import FAMILIES, one_thread, tiny, tokens_of  # noqa: F401
from torch import Tensor, nn

from engine.attention import AttentionCall
from engine.errors import UnsupportedModel
from engine.model import Model, load_model, wrap_model
from kernels.rotary import Rotation

SHARING = ["gemma3n", "gemma4"]
SMALL = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
    "initializer_range": 0.2,
}


def random_network(name: str, **fields: object) -> nn.Module:
    """A causal LM of another family than `tiny_models` has, norms included: ones would hide what a norm does."""
    config = getattr(transformers, name)(**{**SMALL, **fields})
    torch.manual_seed(3)
    network = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for parameter in network.parameters():
        if parameter.ndim == 1:
            nn.init.normal_(parameter, 0.5, 0.3)
    return network


class Recorder:
    """A port that keeps every call of a step; answers zeros, so that hidden states say nothing of positions."""

    def __init__(self) -> None:
        self.calls: list[tuple[AttentionCall, Tensor, Tensor]] = []

    def attend(self, call: AttentionCall, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        self.calls.append((call, query, key))
        return query.new_zeros(query.shape[1], query.shape[0], query.shape[2])


def recorded(
    model: Model, tokens: list[int], positions: list[int]
) -> list[tuple[AttentionCall, Tensor, Tensor]]:
    port = Recorder()
    model.forward(tokens, positions, port, [0])
    return port.calls


@pytest.mark.parametrize("family", SHARING)
def test_layers_that_share_kv_are_one_cache_that_is_stored_once(family: str) -> None:
    spec = tiny(family).model.spec
    full = 32 if family == "gemma4" else 16
    assert [(layer.window, layer.readers) for layer in spec.layers] == [(20, 1), (None, 3), (20, 2)]
    assert [layer.scored_heads for layer in spec.layers] == [4, 12, 8]
    assert spec.blocks.layers == ((2, 16), (2, full), (2, 16))
    assert spec.kv_bytes_per_token == 2 * 2 * (16 + full + 16) * 4
    assert tiny_models.new_pool(tiny(family).model).tables.shape[1] == 3


@pytest.mark.parametrize("rows", [8, 5])  # a whole step, and one that is padded
@pytest.mark.parametrize("family", SHARING)
def test_a_port_hears_of_caches_and_of_who_stores_them(family: str, rows: int) -> None:
    calls = recorded(tiny(family).model, list(tokens_of(rows)), list(range(rows)))
    heard = [(call.layer, call.reader, call.stored) for call, _, _ in calls]
    assert heard == [
        (0, 0, True), (1, 0, True), (2, 0, True), (1, 1, False), (2, 1, False), (1, 2, False)
    ]  # fmt: skip
    stored = {call.layer: key for call, _, key in calls if call.stored}
    assert all(key.shape[1] == rows and torch.equal(key, stored[call.layer]) for call, _, key in calls)


def test_a_port_hears_plain_layers_in_order() -> None:
    calls = recorded(tiny("gemma3").model, [5, 6, 7], [0, 1, 2])
    assert [(call.layer, call.reader, call.stored) for call, _, _ in calls] == [
        (i, 0, True) for i in range(4)
    ]


def masks(length: int, window: int, prompt: int, kept: Tensor) -> dict[str, Tensor]:
    """Additive masks [1, 1, T, T] by layer type: after the prompt, full layers see only `kept` of it."""
    row, column = torch.arange(length).unsqueeze(1), torch.arange(length)
    causal = column <= row
    survives = torch.zeros(length, dtype=torch.bool).index_fill(0, kept, True) | (column >= prompt)
    visible = {
        "full_attention": causal & (survives | (row < prompt)),
        "sliding_attention": causal & (column > row - window),
    }
    return {
        kind: torch.zeros(1, 1, length, length).masked_fill(~seen, float("-inf"))
        for kind, seen in visible.items()
    }


@pytest.mark.parametrize("family", SHARING)
def test_what_is_evicted_from_a_shared_cache_is_gone_for_all_its_readers(family: str) -> None:
    network = tiny_models.build_network(family, num_key_value_heads=1)
    truth = copy.deepcopy(network)
    truth.set_attn_implementation("eager")
    model = wrap_model(network, frozenset())
    text, prompt = tokens_of(80), 60
    wanted = tiny_models.request("a", text[:prompt], tiny_models.snapkv(16))
    done = tiny_models.prefill_all(model, [wanted], chunk=17)["a"]
    kept = torch.from_numpy(done.layout.meta.positions[1, 0]).long()
    assert len(kept) == 16
    pool = tiny_models.new_pool(model)
    logits = tiny_models.decode_row(model, pool, tiny_models.join(pool, done), text[prompt:], prompt)
    with torch.inference_mode():
        mask = masks(len(text), 20, prompt, kept)
        expected = truth(input_ids=torch.tensor([text]), attention_mask=mask, use_cache=False).logits[0]
        whole = truth(input_ids=torch.tensor([text]), use_cache=False).logits[0]
    torch.testing.assert_close(logits, expected[prompt:], atol=1e-4, rtol=0)
    assert (expected - whole)[prompt:].abs().max() > 1e-2, "what was evicted did not matter"


@pytest.mark.filterwarnings("ignore")
def test_layers_that_share_keys_but_not_the_window_are_refused() -> None:
    network = tiny_models.build_network("gemma3n")
    network.model.layers[5].self_attn.sliding_window = 7
    with pytest.raises(UnsupportedModel, match=r"gemma3n_text .* share keys and attend to them differently"):
        wrap_model(network, frozenset())


def test_the_text_model_of_a_whole_gemma3n_checkpoint_is_served(tmp_path) -> None:
    """Published ones hold vision and audio towers too, whose weights are left alone."""
    pair = tiny("gemma3n")
    state = {
        name.replace("model.", "model.language_model.", 1): tensor.contiguous()
        for name, tensor in pair.truth.state_dict().items()
        if name != "lm_head.weight"
    }
    state["model.vision_tower.stem.weight"] = torch.ones(3)
    save_checkpoint(tmp_path, state, transformers.Gemma3nConfig(text_config=pair.truth.config.to_dict()))
    model = load_model(tmp_path)
    assert model.spec.dtype is torch.float32
    prompt = tokens_of(30)
    done = tiny_models.prefill_all(model, [tiny_models.request("a", prompt)])["a"]
    pool = tiny_models.new_pool(model)
    logits = tiny_models.decode_row(model, pool, tiny_models.join(pool, done), [9], 30)
    torch.testing.assert_close(logits[0], pair.full_logits([*prompt, 9])[-1], atol=1e-4, rtol=0)


def save_checkpoint(folder, state: dict[str, Tensor], config: transformers.PretrainedConfig) -> None:
    from safetensors.torch import save_file

    config.architectures, config.dtype = ["Gemma3nForConditionalGeneration"], torch.float32
    config.save_pretrained(folder)
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})


# bf16: keys and cosines are rounded to 8 bits.
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 0.02)])
@pytest.mark.parametrize("family", FAMILIES)
def test_rotations_turn_the_keys_and_queries_of_any_position(
    family: str, dtype: torch.dtype, tolerance: float
) -> None:
    model = wrap_model(tiny_models.build_network(family).to(dtype), frozenset())
    assert_rotations(model, tolerance)


def assert_rotations(model: Model, tolerance: float) -> None:
    """A token at position 3, turned, is the same token at 0, 17 and 300."""
    positions = [3, 0, 17, 300]
    turns = torch.tensor([place - 3 for place in positions])
    for call, query, key in recorded(model, [8] * 4, positions):
        rotation = model.spec.layers[call.layer].rotation
        assert rotation is not None
        for states in (query, key):
            turned = rotation.rotate(states[:, :1].float().expand(-1, 4, -1), turns)
            error = (turned - states.float()).abs().max() / states.abs().max()
            assert error < tolerance


def angle(rotation: Rotation | None) -> float:
    """Of the second pair after one token: what tells frequency tables apart."""
    assert rotation is not None
    return float(rotation.inv_freq[1])


def test_each_kind_of_layer_has_its_own_frequencies() -> None:
    gemma3 = [angle(layer.rotation) for layer in tiny("gemma3").model.spec.layers]
    assert gemma3 == pytest.approx([100 ** (-1 / 16), 1e4 ** (-1 / 16) / 2] * 2)
    gemma3n = [angle(layer.rotation) for layer in tiny("gemma3n").model.spec.layers]
    assert gemma3n == pytest.approx([1e4 ** (-1 / 8), 1e6 ** (-1 / 8), 1e4 ** (-1 / 8)])


@pytest.mark.parametrize(
    ("name", "fields", "pairs", "interleaved"),
    [
        ("CohereConfig", {}, 8, True),
        ("GlmConfig", {"head_dim": 16}, 4, True),
        ("GPTNeoXConfig", {}, 2, False),
        ("PhiConfig", {}, 4, False),
        ("NanoChatConfig", {}, 8, False),
    ],
)
def test_partial_interleaved_and_backward_rotations_are_found(
    name: str, fields: dict[str, object], pairs: int, interleaved: bool
) -> None:
    model = wrap_model(random_network(name, **fields), frozenset())
    for layer in model.spec.layers:
        assert layer.rotation is not None
        assert (len(layer.rotation.inv_freq), layer.rotation.interleaved) == (pairs, interleaved)
    assert_rotations(model, 1e-4)


def test_a_factor_on_the_cosines_is_not_taken_for_a_rotation() -> None:
    yarn = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
    network = tiny_models.build_network("llama", rope_parameters=yarn)
    assert network.model.rotary_emb.attention_scaling > 1.1
    assert_rotations(wrap_model(network, frozenset()), 1e-4)


def test_a_layer_without_positions_has_the_identity_for_a_rotation() -> None:
    spec = wrap_model(random_network("SmolLM3Config"), frozenset()).spec
    still = spec.layers[3].rotation
    assert still is not None
    states = torch.randn(2, 3, 16)
    assert torch.equal(still.rotate(states, torch.tensor([1, 50, 400])), states)
    assert angle(spec.layers[0].rotation) > 0


@pytest.mark.parametrize(
    ("name", "fields"),
    [("GPT2Config", {}), ("HunYuanDenseV1Config", {"head_dim": 16})],
    ids=["learned", "normed"],
)
def test_keys_that_are_not_merely_rotated_have_no_rotation(name: str, fields: dict[str, object]) -> None:
    """GPT-2 learns its positions; HunYuan scales keys after it rotated them."""
    spec = wrap_model(random_network(name, **fields), frozenset()).spec
    assert all(layer.rotation is None for layer in spec.layers)


@pytest.mark.parametrize("family", FAMILIES)
def test_output_weights_are_those_of_the_layer_that_stores(family: str) -> None:
    model = tiny(family).model
    storing = range(3) if family in SHARING else range(len(model.spec.layers))
    for cache in storing:
        layer = model.spec.layers[cache]
        weight = layer.output_weight
        assert weight is not None
        assert torch.equal(weight, model.network.model.layers[cache].self_attn.o_proj.weight)
        assert weight.shape == (48, layer.query_heads * layer.head_dim)
        assert not weight.requires_grad


@pytest.mark.parametrize("products", [True, False])
def test_output_weights_are_found_whatever_the_processor_multiplies(
    products: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.model.has_bf16_products", lambda: products)
    network = tiny_models.build_network("llama").to(torch.bfloat16)
    spec = wrap_model(network, frozenset()).spec
    for layer, module in zip(spec.layers, network.model.layers, strict=True):
        assert layer.output_weight is not None
        assert torch.equal(layer.output_weight, module.self_attn.o_proj.weight)


def test_output_weights_of_transposed_projections_are_turned_round() -> None:
    network = random_network("GPT2Config")
    weight = wrap_model(network, frozenset()).spec.layers[2].output_weight
    projection, states = network.transformer.h[2].attn.c_proj, torch.randn(3, 64)
    assert weight is not None
    torch.testing.assert_close(states @ weight.T, (projection(states) - projection.bias).detach())


def test_a_projection_that_is_more_than_a_matrix_has_no_output_weight() -> None:
    network = tiny_models.build_network("llama")
    attention = network.model.layers[1].self_attn
    attention.o_proj = nn.Sequential(attention.o_proj, nn.Tanh())
    spec = wrap_model(network, frozenset()).spec
    assert spec.layers[0].output_weight is not None
    assert spec.layers[1].output_weight is None
