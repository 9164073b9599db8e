"""Which models are refused at load, by name, until what they need is built, and which recipes a model cannot serve."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.errors import InvalidRequest, UnsupportedModel
from policies import get_policy

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from engine.model import ModelSpec
    from policies import Recipe

# Factors of these RoPE variants are chosen from the largest position of the whole flattened batch, so a request's KV
# would depend on its neighbours.
_BATCH_DEPENDENT_ROPE = {"longrope", "dynamic"}
_ATTENTION_LAYERS = {"full_attention", "sliding_attention"}


def refuse_unsupported(config: PretrainedConfig) -> None:
    """Raise `UnsupportedModel` naming what this model needs and kvtide does not have; return if it can be served."""
    text = config.get_text_config()
    batch_rope = _rope_types(text) & _BATCH_DEPENDENT_ROPE
    for found, what in (
        (config.is_encoder_decoder, "cross-attention of an encoder-decoder"),
        (_field(text, "kv_lora_rank"), "multi-head latent attention (kv_lora_rank)"),
        (
            _other_layers(text),
            f"layers other than softmax attention ({', '.join(sorted(_other_layers(text)))})",
        ),
        (_recurrent(text), "recurrent (state space) layers"),
        (batch_rope, f"RoPE scaling {', '.join(sorted(batch_rope))}"),
        (_has_key(_rope_parameters(text), "mrope_section"), "multimodal RoPE (mrope_section)"),
        (_field(text, "attention_chunk_size"), "chunked attention (attention_chunk_size)"),
        (_field(text, "use_bidirectional_attention"), "bidirectional attention"),
        (_field(text, "alibi"), "ALiBi position bias"),
    ):
        if found:
            raise unsupported(config, what)


def unsupported(config: PretrainedConfig, what: str) -> UnsupportedModel:
    """The refusal of a model by name, for a need that shows in its configuration or only when it runs."""
    name = f"{config.model_type} ({', '.join(config.architectures or ['no architecture named'])})"
    return UnsupportedModel(f"model {name} needs {what}, which kvtide does not serve yet")


def refuse_recipe(spec: ModelSpec, recipe: Recipe) -> None:
    """Raise `InvalidRequest` naming the field that asks for what this model's layers do not have; return otherwise.

    Selection needs a layer's rotation or output weight only where it may select, in layers that see everything. Slot
    positions move keys, whatever layer they are of. A refusal does not depend on the prompt.
    """
    policy = get_policy(recipe)
    scored = [layer for layer in spec.layers if layer.window is None]
    for missing, field, what in (
        (
            recipe.positions == "slot" and any(layer.rotation is None for layer in spec.layers),
            "kv.positions",
            "'slot' needs rotary position embeddings",
        ),
        (
            policy.needs_rotation and any(layer.rotation is None for layer in scored),
            "kv.policy",
            f"{recipe.policy!r} needs rotary position embeddings",
        ),
        (
            policy.needs_output_weight and any(layer.output_weight is None for layer in scored),
            "kv.critical" if recipe.critical else "kv.policy",
            "weighing values by the output projection needs that to be one plain matrix",
        ),
    ):
        if missing:
            raise InvalidRequest(f"{field}: {what}, and this model has layers where it is not so", field)


def _field(config: PretrainedConfig, name: str) -> object:
    """A configuration field, None where the model has no such thing."""
    try:
        return getattr(config, name, None)
    except RuntimeError:  # how transformers says that layers have different values: some layer has one
        return True


def _other_layers(config: PretrainedConfig) -> set[str]:
    return set(getattr(config, "layer_types", None) or ()) - _ATTENTION_LAYERS


def _recurrent(config: PretrainedConfig) -> bool:
    return any(_field(config, key) for key in ("mamba_d_state", "ssm_cfg", "state_size", "attn_layer_period"))


def _rope_parameters(config: PretrainedConfig) -> dict[str, object]:
    return getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}


def _rope_types(config: PretrainedConfig) -> set[str]:
    """All rope_type values, also where each layer type has its own parameters (Gemma 3)."""
    found: set[str] = set()

    def walk(value: object) -> None:
        if isinstance(value, dict):
            for key, inner in value.items():
                if key in ("rope_type", "type") and isinstance(inner, str):
                    found.add(inner)
                walk(inner)

    walk(_rope_parameters(config))
    return found


def _has_key(value: object, key: str) -> bool:
    return isinstance(value, dict) and (key in value or any(_has_key(inner, key) for inner in value.values()))
