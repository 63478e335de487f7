"""Looks at the attention of a model from inside, without weights: which layer asks for what.

A forward pass of a copy on the `meta` device has shapes and no numbers. It costs milliseconds, whatever the size of the
model. It finds architectures that call attention in a way that neither trainers nor engines know, such as twice in a
layer, or with keys and values of different sizes. Whatever cannot run without numbers is left to the other checks.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_PROBE_ATTENTION = "headway_probe"
_TOKENS = 3


class AttentionCalls:
    """The calls of one forward pass."""

    def __init__(self, *, shorter_values: bool) -> None:
        self._shorter_values = shorter_values
        """Whether values may be shorter than keys."""
        self.shapes: dict[int, tuple[tuple[int, ...], tuple[int, ...]]] = {}
        """Shapes of keys and values of each layer."""
        self.problem: str | None = None

    def add(self, layer: int, query: Tensor, key: Tensor, value: Tensor, options: Mapping[str, Any]) -> None:
        """Note one call."""
        if layer in self.shapes:
            self.problem = "a layer computes attention more than once"
        elif not self._fits(key, value):
            self.problem = "its keys and values have different sizes"
        elif query.shape[2] != key.shape[2]:
            self.problem = "its queries and keys are not those of the same tokens"
        elif self.shapes and next(iter(self.shapes.values()))[0] != tuple(key.shape):
            self.problem = "its layers have keys of different sizes"
        elif options.get("position_bias") is not None:
            self.problem = "its attention adds a bias of positions"
        self.shapes[layer] = tuple(key.shape), tuple(value.shape)

    def _fits(self, key: Tensor, value: Tensor) -> bool:
        shorter = self._shorter_values and value.shape[-1] < key.shape[-1]
        return key.shape == value.shape or (shorter and key.shape[:-1] == value.shape[:-1])


_found: dict[tuple[type, str, bool], str | None] = {}
"""What was found about an architecture: an engine builds the same one each time that it wakes up."""


def find_call_problem(model: PreTrainedModel, *, shorter_values: bool = False) -> str | None:
    """Return what is unusual about the calls of attention in `model`; None if nothing is, or it cannot be seen."""
    key = type(model), model.config.to_json_string(use_diff=False), shorter_values
    if key not in _found:
        _found[key] = _probe_calls(model, shorter_values=shorter_values)
    return _found[key]


def _probe_calls(model: PreTrainedModel, *, shorter_values: bool) -> str | None:
    """Run a copy without weights, and return what is unusual about its calls."""
    from transformers import AttentionInterface

    AttentionInterface.register(_PROBE_ATTENTION, _note_call)
    calls = AttentionCalls(shorter_values=shorter_values)
    with torch.device("meta"), torch.no_grad():
        without_memory = {
            id(one): nn.Parameter(torch.empty(one.shape, dtype=one.dtype), requires_grad=False)
            for one in model.parameters()
        }
        probe = deepcopy(model, without_memory).to("meta")
        try:
            probe.set_attn_implementation(_PROBE_ATTENTION)
            if hasattr(probe, "set_experts_implementation"):
                probe.set_experts_implementation("batched_mm")  # the only one whose shapes do not depend on numbers
            at = torch.arange(_TOKENS)[None]
            probe(input_ids=at, position_ids=at, use_cache=False, headway_calls=calls)
        except _UnseenCall:
            return "its layers do not pass on what attention needs"
        except Exception:  # whatever needs numbers: this look is one of several checks
            return calls.problem
    layers = getattr(model.config.get_text_config(), "num_hidden_layers", len(calls.shapes))
    return calls.problem or (None if len(calls.shapes) == layers else "not all of its layers compute attention")


class _UnseenCall(Exception):
    """A call of attention without the keyword that was given to the forward pass."""


def _note_call(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    headway_calls: AttentionCalls | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    if headway_calls is None:
        raise _UnseenCall
    headway_calls.add(int(module.layer_idx), query, key, value, options)  # type: ignore[arg-type]
    return torch.empty((*query.shape[:3], value.shape[-1])).transpose(1, 2), None
