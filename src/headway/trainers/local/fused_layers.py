"""Decoder layers whose work between matrix products is fused, and which recompute only what is cheap.

`transformers` computes norms, rotations, gates and residuals in some forty kernels a layer, forward and backward. A
layer of the usual form (two norms, attention, gated linear unit) gets a forward pass of its own instead, with the same
modules and weights. Adapters in these modules work as before.

With recomputation, what follows the attention is computed again in the backward pass, and attention is not: it is most
of the work of a long sequence, and its results are small.

Guarantees: a layer is replaced only if its result and the gradient of its input are those of the original on a trial,
up to rounding. Otherwise the original stays, and one line says why. Without packed spans the original is called.

Legend: L tokens of a pack, E hidden size, H heads, D size of a head.
"""

from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from headway.models.model_checks import print_once
from headway.trainers.local import layer_functions, tree_attention
from headway.trainers.local.tree_packing import AttentionSpans, PromptTree

_LAYER_PARTS = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
_ATTENTION_PARTS = {"q_proj", "k_proj", "v_proj", "o_proj"}
_HEAD_NORMS = {"q_norm", "k_norm"}
_MLP_PARTS = {"gate_proj", "up_proj", "down_proj", "act_fn"}


@dataclass(slots=True)
class ActivationPolicy:
    """What happens to the activations of a model between forward and backward pass. Learners may change it."""

    recompute: bool
    """Compute cheap ones again instead of keeping them."""
    offload: bool = False
    """Keep the others in host memory."""


def fuse_decoder_layers(model: Any, activations: ActivationPolicy) -> int:
    """Fuse the layers of `model` that have the usual form, and return how many these are."""
    layers = [module for module in model.modules() if hasattr(module, "self_attn")]
    for number, layer in enumerate(layers):
        problem = find_structural_problem(layer)
        if problem is None:
            fused = FusedLayer(layer, activations)
            problem = _find_numerical_problem(model.base_model, layer, fused)
        if problem is not None:
            print_once(f"{type(layer).__name__} is computed as transformers does it, without fused kernels: {problem}")
            return number
        layer.forward = fused
        layer.gradient_checkpointing = layer.training = False  # it recomputes by itself
    return len(layers)


def is_fused(layer: nn.Module) -> bool:
    """Return whether `layer` has the forward pass of this module."""
    return isinstance(layer.forward, FusedLayer)


def find_structural_problem(layer: Any) -> str | None:
    """Return why a layer is not of the usual form; None if it is."""
    parts, attention = _children(layer), layer.self_attn
    if parts != _LAYER_PARTS:
        return f"its parts are {', '.join(sorted(parts))}"
    parts = _children(attention)
    if parts - _HEAD_NORMS != _ATTENTION_PARTS or len(parts & _HEAD_NORMS) == 1 or attention._parameters:
        return f"its attention has the parts {', '.join(sorted(parts))}"
    norms = [layer.input_layernorm, layer.post_attention_layernorm]
    norms += [getattr(attention, name) for name in sorted(parts & _HEAD_NORMS)]
    if any(_read_epsilon(norm) is None or set(norm._parameters) != {"weight"} for norm in norms):
        return "its norms are not root-mean-square norms"
    if not isinstance(getattr(attention, "head_dim", None), int) or not hasattr(attention, "scaling"):
        return "its attention does not say the size of its heads"
    return None


def _children(module: nn.Module) -> set[str]:
    return {name for name, part in module.named_children() if list(part.parameters()) or name == "act_fn"}


def _read_epsilon(norm: Any) -> float | None:
    if not type(norm).__name__.endswith("RMSNorm"):
        return None
    found = getattr(norm, "variance_epsilon", getattr(norm, "eps", None))
    return found if isinstance(found, float) else None


class FusedLayer:
    """The forward pass of one decoder layer. It owns no weights, and reads those of the layer at every call."""

    def __init__(self, layer: Any, activations: ActivationPolicy) -> None:
        self._layer = layer
        self._activations = activations
        self._original = layer.forward
        mlp = layer.mlp
        self._is_gated = _children(mlp) == _MLP_PARTS and type(mlp.act_fn).__name__ in ("SiLU", "SiLUActivation")

    def __call__(
        self,
        hidden_states: Tensor,
        *args: Any,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        headway_spans: AttentionSpans | None = None,
        **kwargs: Any,
    ) -> Any:
        if headway_spans is None or position_embeddings is None or args or kwargs.get("past_key_values") is not None:
            kwargs |= {"position_embeddings": position_embeddings, "headway_spans": headway_spans}
            return self._original(hidden_states, *args, **kwargs)
        x_LE = hidden_states[0]
        cos, sin = position_embeddings
        attended_LE = self._attend(x_LE, cos[0], sin[0], headway_spans)
        if self._activations.recompute and torch.is_grad_enabled():
            out_LE = checkpoint(
                self._finish, *attended_LE, use_reentrant=False, preserve_rng_state=False, determinism_check="none"
            )
        else:
            out_LE = self._finish(*attended_LE)
        return out_LE[None]

    def _attend(self, x_LE: Tensor, cos_LD: Tensor, sin_LD: Tensor, spans: AttentionSpans) -> tuple[Tensor, Tensor]:
        """Return the input and the results of all heads."""
        attention = self._layer.self_attn
        x_LE, normed_LE = _norm(self._layer.input_layernorm, x_LE)
        projections = [attention.q_proj, attention.k_proj, attention.v_proj]
        projected = layer_functions.apply_joined_linears(normed_LE, projections)
        q, k, v = (x.view(len(x), -1, attention.head_dim) for x in projected)
        if hasattr(attention, "q_norm"):
            q, k = _norm_heads(attention.q_norm, q), _norm_heads(attention.k_norm, k)
        q, k = layer_functions.rotate(q, k, cos_LD, sin_LD)
        v = v.contiguous() if spans.key_K is None else v  # else it would keep queries and keys in memory
        window = getattr(attention, "sliding_window", None)
        out_LHD = tree_attention.attend_spans(q, k, v, spans, window, attention.scaling)
        return x_LE, out_LHD.flatten(1)

    def _finish(self, x_LE: Tensor, attended_LE: Tensor) -> Tensor:
        """Return the result of the layer."""
        layer = self._layer
        total_LE, normed_LE = _norm(layer.post_attention_layernorm, x_LE, layer.self_attn.o_proj(attended_LE))
        if not self._is_gated:
            out_LE: Tensor = layer.mlp(normed_LE[None])[0]
            return total_LE + out_LE
        gate_LF, up_LF = layer_functions.apply_linears(normed_LE, [layer.mlp.gate_proj, layer.mlp.up_proj])
        found: Tensor = total_LE + layer.mlp.down_proj(layer_functions.gate(gate_LF, up_LF))
        return found


def _norm(norm: Any, x_LE: Tensor, delta_LE: Tensor | None = None) -> tuple[Tensor, Tensor]:
    return layer_functions.add_norm(x_LE, delta_LE, norm.weight, _read_epsilon(norm) or 0.0)


def _norm_heads(norm: Any, x_LHD: Tensor) -> Tensor:
    _, normed = _norm(norm, x_LHD.flatten(0, 1))
    return normed.view_as(x_LHD)


def _find_numerical_problem(backbone: Any, layer: Any, fused: FusedLayer) -> str | None:
    """Return how far result and input gradient are from the original's on a trial; None if rounding explains it.

    Trained layers may turn rounding into large differences: keys of Qwen2.5 have biases of 145, which make attention
    all but a choice of one token. So in half precision the judge is the layer in float32: a fused layer is right if it
    is at most twice as far from it as the original.
    """
    is_half = layer.input_layernorm.weight.dtype in (torch.bfloat16, torch.float16)
    try:
        original, found = (_try_layer(backbone, layer, forward) for forward in (fused._original, fused))
        worst = _compare(found, original)
        if worst < (5e-2 if is_half else 1e-4):
            return None
        if is_half:
            exact = _try_layer(backbone, (copied := deepcopy(layer).float()), copied.forward)
            if _compare(found, exact) < min(2 * _compare(original, exact), 0.5):
                return None
    except Exception as error:
        return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
    return f"its results would be {worst:.2g} off"


def _try_layer(backbone: Any, layer: Any, forward: Any) -> list[Tensor]:
    """Return what `forward` adds to random inputs of two trees, and the gradient of the input."""
    weight = layer.input_layernorm.weight
    generator = torch.Generator(weight.device).manual_seed(0)
    trees = (PromptTree(start=0, prefix=7, members=(9, 5)), PromptTree(start=21, prefix=4, members=(8,)))
    position_L = torch.tensor([*range(16), *range(7, 12), *range(12)], device=weight.device)
    half = torch.bfloat16 if weight.dtype == torch.float32 else weight.dtype
    x, direction = (
        torch.randn((1, len(position_L), len(weight)), generator=generator, device=weight.device).to(half).to(weight)
        for _ in range(2)
    )
    spans = AttentionSpans.of_trees(trees, weight.device)
    options = {"position_embeddings": backbone.rotary_emb(x, position_L[None]), "attention_mask": None}
    leaf = x.clone().requires_grad_()
    with torch.enable_grad():
        more = forward(leaf, headway_spans=spans, headway_trees=trees, position_ids=position_L[None], **options) - leaf
    return [more.detach(), torch.autograd.grad((more * direction).sum(), leaf)[0]]


def _compare(found: list[Tensor], wanted: list[Tensor]) -> float:
    """Return the largest difference of two tensors, relative to the norm of the wanted one."""
    return max(float((a.float() - b.float()).norm() / b.float().norm()) for a, b in zip(found, wanted, strict=True))
