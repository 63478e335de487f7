"""Forward passes of a model in a block: logits of one token for each lane, or the KV of pieces of prompts.

`FusedDecoder` knows the families that are built like Llama and runs them with nine kernels a layer; the stream between
layers is float32. `GenericDecoder` runs the forward of any `transformers` decoder through the attention interface.
`make_decoder` chooses one; results are the same up to rounding.

Weights are read at every call where `ServedParameters` has put them: they must have been installed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from headway.engines.native.block_ops import BlockOps, HeadShape, KeysValues, RotaryTable
from headway.engines.native.kv_cache import PagedKvCache
from headway.engines.native.quantized_products import Matrix, write_kv_rows
from headway.engines.native.served_linear import FusedLinearSlice, ServedLinear
from headway.engines.native.slot_attention import install_attention, widen_values
from headway.models.attention_scores import ScoreExtras
from headway.models.expert_routing import RoutingRecorder, find_mixture

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_LIKE_LLAMA = frozenset({"LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"})
_ROTATIONS = frozenset({"default", "linear", "llama3", "yarn"})
"""Rotations that are a table; the others change with the length of a sequence."""
Attend = Callable[[Tensor, KeysValues, HeadShape, Tensor | None], Tensor]
"""Computes attention of queries over the KV of one layer, with sinks or without."""


class KvView:
    """An `AttentionView`: the positions and KV rows of the tokens of one forward pass."""

    def __init__(self, cache: PagedKvCache, positions_T: Tensor, rows_T: Tensor, attend: Attend) -> None:
        self.kv = cache.layers
        self.positions = positions_T
        self.rows = rows_T
        self._attend = attend

    def attend(self, layer: int, q_THD: Tensor, heads: HeadShape, sinks_H: Tensor | None = None) -> Tensor:
        """Return attention over what is in the KV now."""
        return self._attend(q_THD, self.kv[layer], heads, sinks_H)

    def attend_layer(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scaling: float | None,
        window: int | None,
        extras: ScoreExtras,
    ) -> Tensor:
        keys, values = self.kv[layer]
        size, value_size = query.shape[-1], value.shape[-1]
        write_kv_rows(keys, self.rows, key[0].transpose(0, 1))
        write_kv_rows(values, self.rows, widen_values(value, size)[0].transpose(0, 1))
        heads = HeadShape(query.shape[1], key.shape[1], size, scaling or size**-0.5, window or 0, extras.softcap)
        return self.attend(layer, query[0].transpose(0, 1).contiguous(), heads, extras.sinks)[..., :value_size]


def make_decoder(model: PreTrainedModel, ops: BlockOps, positions: int) -> FusedDecoder | GenericDecoder:
    """Return the fastest decoder that computes this model. `positions`: length of the longest sequence."""
    return FusedDecoder(model, ops, positions) if is_llama_like(model) else GenericDecoder(model)


def is_llama_like(model: PreTrainedModel) -> bool:
    """Return whether `FusedDecoder` computes what this model computes."""
    if type(model).__name__ not in _LIKE_LLAMA or getattr(model.config, "hidden_act", None) != "silu":
        return False
    layers = model.model.layers
    fused = all(_get_fused(layer.self_attn.q_proj) and _get_fused(layer.mlp.gate_proj) for layer in layers)
    same = fused and len({layer.quantized for layer in _list_linears(model)}) == 1
    return same and getattr(model.model.rotary_emb, "rope_type", "default") in _ROTATIONS


def _list_linears(model: Any) -> list[ServedLinear]:
    """Return the linear layers of a model like Llama, but for its head."""
    return [
        _require(part if isinstance(part, ServedLinear) else _get_fused(part))
        for layer in model.model.layers
        for part in (layer.self_attn.q_proj, layer.self_attn.o_proj, layer.mlp.gate_proj, layer.mlp.down_proj)
    ]


def project_to_logits(x_BE: Tensor, head: ServedLinear) -> Tensor:
    """Return logits in float32, whatever the weights are: bfloat16 would round them by more than tokens differ."""
    weight: Any = head.operand
    if weight.is_cuda and weight.dtype != torch.float32:
        logits = torch.mm(x_BE, weight.t(), out_dtype=torch.float32)
    else:
        logits = linear(x_BE.float(), weight.float())
    return logits if head.bias is None else logits + head.bias.float()


class FusedDecoder:
    """Runs Llama, Mistral, Qwen2, Qwen3, SmolLM and SmolLM2."""

    def __init__(self, model: PreTrainedModel, ops: BlockOps, positions: int) -> None:
        self._model: Any = model.model
        self._head: ServedLinear = model.lm_head
        self._ops = ops
        attention = self._model.layers[0].self_attn
        at = torch.arange(positions, device=self._model.rotary_emb.inv_freq.device)
        cos, sin = self._model.rotary_emb(torch.empty(0, dtype=torch.float32, device=at.device), at[None])
        half = attention.head_dim // 2
        self._cos, self._sin = cos[0, :, :half].contiguous(), sin[0, :, :half].contiguous()
        self._add_norm = ops.add_norm_quantized if _list_linears(model)[0].quantized else ops.add_norm

    def logits(self, tokens_B: Tensor, view: KvView) -> Tensor:
        """Return logits (B, V), float32."""
        hidden = self._forward(tokens_B, view, with_output=True)
        return project_to_logits(_require(hidden), self._head)

    def prefill(self, tokens_T: Tensor, view: KvView) -> None:
        """Compute keys and values only."""
        self._forward(tokens_T, view, with_output=False)

    def _forward(self, tokens_T: Tensor, view: KvView, *, with_output: bool) -> Tensor | None:
        ops, model = self._ops, self._model
        x_TE = model.embed_tokens.weight.index_select(0, tokens_T).float()
        delta: Tensor | None = None
        for number, layer in enumerate(model.layers):
            norm = layer.input_layernorm
            normed = self._add_norm(x_TE, delta, norm.weight, norm.variance_epsilon)
            attention = layer.self_attn
            qkv = self._product(normed, _get_fused(attention.q_proj))
            heads = _read_heads(attention, model.config)
            rotary = self._make_rotation(attention)
            q_THD = ops.rotate_store(qkv, heads, rotary, view.positions, view.rows, view.kv[number])
            if not with_output and number + 1 == len(model.layers):
                return None
            attended = view.attend(number, q_THD, heads)
            delta = self._product(attended.view(len(attended), -1), attention.o_proj)
            norm = layer.post_attention_layernorm
            normed = self._add_norm(x_TE, delta, norm.weight, norm.variance_epsilon)
            gate_up = _require(_get_fused(layer.mlp.gate_proj))
            gated = (
                ops.gated(normed, gate_up.operand, gate_up.bias)
                if gate_up.down is None
                else ops.gate(self._product(normed, gate_up), gate_up.down.dtype)
            )
            delta = self._product(gated, layer.mlp.down_proj)
        return ops.add_norm(x_TE, delta, model.norm.weight, model.norm.variance_epsilon)

    def _product(self, x: Matrix, layer: ServedLinear | None) -> Tensor:
        layer = _require(layer)
        product = self._ops.product(x, layer.operand, layer.bias)
        return product if layer.down is None else layer.add_adapter(product, x)

    def _make_rotation(self, attention: Any) -> RotaryTable:
        q_norm, k_norm = getattr(attention, "q_norm", None), getattr(attention, "k_norm", None)
        if q_norm is None or k_norm is None:
            return RotaryTable(self._cos, self._sin, None, None, 0.0)
        return RotaryTable(self._cos, self._sin, q_norm.weight, k_norm.weight, q_norm.variance_epsilon)


class ExpertProducts:
    """Chooses how the experts of a mixture are multiplied on a GPU; does nothing to other models, and on a CPU.

    Products of groups in bfloat16 need no number on the host. In other types they do, which a captured graph cannot
    wait for: there decode steps gather the weights of each token's experts, and pieces of prompts wait for the host.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._model: Any = model
        self._mixes = find_mixture(model) is not None and hasattr(model, "set_experts_implementation")
        self._chosen = ""

    def choose(self, *, decodes: bool) -> None:
        """Choose the products for the next forward pass."""
        if not self._mixes:
            return
        weight = next(self._model.parameters())
        wanted = "batched_mm" if decodes and weight.dtype != torch.bfloat16 else "grouped_mm"
        if weight.is_cuda and wanted != self._chosen:
            self._model.set_experts_implementation(wanted)
            self._chosen = wanted


class GenericDecoder:
    """Runs any model that goes through the attention interface."""

    def __init__(self, model: PreTrainedModel) -> None:
        install_attention(model)
        self._model = model
        self._experts = ExpertProducts(model)
        self.recorder: RoutingRecorder | None = None

    def logits(self, tokens_B: Tensor, view: KvView) -> Tensor:
        self._prepare(view, decodes=True)
        output = self._model(input_ids=tokens_B[None], position_ids=view.positions[None], use_cache=False, view=view)
        logits_BV: Tensor = output.logits[0].float()
        return logits_BV

    def _prepare(self, view: KvView, *, decodes: bool) -> None:
        self._experts.choose(decodes=decodes)
        if self.recorder is not None:
            self.recorder.rows = view.rows

    def prefill(self, tokens_T: Tensor, view: KvView) -> None:
        self._prepare(view, decodes=False)
        positions = view.positions[None]
        self._model(input_ids=tokens_T[None], position_ids=positions, use_cache=False, logits_to_keep=1, view=view)


def _read_heads(attention: Any, config: Any) -> HeadShape:
    window = getattr(attention, "sliding_window", None)
    if type(attention).__name__ == "MistralAttention":  # the one family that keeps it in its configuration alone
        window = getattr(config, "sliding_window", None)
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    return HeadShape(heads, kv_heads, attention.head_dim, attention.scaling, window or 0)


def _get_fused(part: Any) -> ServedLinear | None:
    return part.whole if isinstance(part, FusedLinearSlice) else None


def _require(value: Any) -> Any:
    if value is None:
        raise RuntimeError("no weights")
    return value


BlockDecoder = FusedDecoder | GenericDecoder
