"""Models that are cut over ranks: layers by columns and rows (`plan`), everything by `fully_shard`, sequences by parts.

Guarantees: numbers and gradients are those of the whole model, up to rounding, the same on every rank that looks at the
same pack. Weights are held in float32, as the masters of one process are, and gathered layer by layer in the precision
that is computed in. A frozen model is held in that precision.

Each rank reads the whole model into the memory of the host first and puts its pieces onto its device.
Legend: N actions of a pack, n those that follow a token of this rank, H hidden size.
"""

# ruff: noqa: N803, N806

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from headway.algorithms import TokenLogps, token_logps
from headway.errors import ConfigError
from headway.trainers.local import lora, norms
from headway.trainers.local.model import Critic, Policy, hidden_of
from headway.trainers.local.packing import Pack
from headway.trainers.local.settings import LocalSettings
from headway.trainers.sharded import context
from headway.trainers.sharded.pieces import whole
from headway.trainers.sharded.plan import split_layers


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Cut:
    """How a model is cut."""

    shard: DeviceMesh
    tensor: DeviceMesh | None
    """Ranks that share layers."""
    context: Any
    """The group of ranks that share sequences; None: nobody does."""


class Root(nn.Module):
    """What `fully_shard` sees as one model: from a pack to numbers of its actions.

    `numbers` makes them from hidden states and chosen tokens; everything that it reads is gathered meanwhile.
    """

    def __init__(
        self, model: nn.Module, backbone: Any, numbers: Callable[[Tensor, Tensor], tuple[Tensor, ...]], cut: Cut
    ) -> None:
        super().__init__()
        self.model = model
        self._backbone, self._numbers, self._group = [backbone], numbers, cut.context

    def forward(self, pack: Pack) -> tuple[Tensor, ...]:
        backbone = self._backbone[0]
        if self._group is None:
            return self._numbers(hidden_of(backbone, pack)[pack.before_N], pack.chosen_N)
        part = context.part_of(pack, self._group)
        hidden_nH = context.hidden_of(backbone, part)[part.before_n]
        found = self._numbers(hidden_nH, pack.chosen_N[part.mine_n])
        return tuple(context.spread(one_n, part, pack.chosen_N.numel()) for one_n in found)


class ShardedPolicy(Policy):
    """A policy of which every rank holds a piece; whole while it is made and tried."""

    def __init__(self, model: Any, settings: LocalSettings, cut: Cut, *, adapters: bool = True) -> None:
        self._root: nn.Module | None = None
        super().__init__(model, _as_held(model, settings), adapters=adapters)
        self._settings = settings
        self._adapted = _adapted(self.causal)
        if torch.device(settings.device).type == "cuda":
            norms.fuse(self.causal)
        self._root = _cut(self.causal, self.backbone, self._numbers, cut, settings)
        self._shards = dict(self._named())

    def logps(self, pack: Pack) -> TokenLogps:
        if self._root is None:
            return super().logps(pack)
        logp_N, entropy_N = self._root(pack)
        return TokenLogps(logp_N=logp_N, entropy_N=entropy_N)

    def _numbers(self, hidden_NH: Tensor, chosen_N: Tensor) -> tuple[Tensor, ...]:
        found = token_logps(
            hidden_NH, self.head.weight, chosen_N, bias_V=self.head.bias, temperature=self._settings.temperature
        )
        return found.logp_N, found.entropy_N

    def shards(self) -> dict[str, Tensor]:
        """All weights by their names, as pieces; with LoRA those of the layers under the adapters."""
        return self._shards

    def whole(self, name: str) -> Tensor:
        """One of `shards`, gathered and with its adapter; all ranks ask for the same at the same time."""
        found = whole(self._shards[name])
        layer = self._adapted.get(name)
        if layer is None:
            return found
        down, up = (whole(side[lora.ADAPTER].weight) for side in (layer.lora_A, layer.lora_B))
        more: Tensor = up @ down * layer.scaling[lora.ADAPTER]
        return found + (more.T if layer.fan_in_fan_out else more).to(found.dtype)

    def weights(self) -> dict[str, Tensor]:
        """All of them at once: for models that a host has room for."""
        return {name: self.whole(name) for name in self._shards}

    def _named(self) -> Iterator[tuple[str, Tensor]]:
        once = {name for name, _ in self.causal.named_parameters()} | {name for name, _ in self.causal.named_buffers()}
        for name, tensor in self.causal.state_dict().items():
            if name in once and ".lora_" not in name:  # the second name of a tied weight is not among them
                yield lora.plain(name), tensor


class ShardedCritic(Critic):
    """A critic of which every rank holds a piece."""

    _root: nn.Module

    def __init__(self, model: Any, settings: LocalSettings, cut: Cut) -> None:
        super().__init__(model, _as_held(model, settings))
        fully_shard(self.value, mesh=cut.shard, reshard_after_forward=True)  # alone: computed in full precision
        root = _cut(self, self.backbone, self._numbers, cut, settings)
        object.__setattr__(self, "_root", root)  # not a part of what it is around

    def values(self, pack: Pack) -> Tensor:
        found: tuple[Tensor, ...] = self._root(pack)
        return found[0]

    def _numbers(self, hidden_NH: Tensor, chosen_N: Tensor) -> tuple[Tensor, ...]:
        return (self.value(hidden_NH.to(torch.promote_types(hidden_NH.dtype, torch.float32))).squeeze(-1),)


def _adapted(model: nn.Module) -> dict[str, Any]:
    """Layers with adapters, by the names of their weights. Raises `ConfigError` where they are not those of a layer."""
    found = lora.adapted(model)
    for name, layer in found.items():
        if hasattr(layer, "parameter_name") or lora.ADAPTER not in layer.lora_A:
            raise ConfigError(
                f"adapters of experts and embeddings cannot be cut over ranks, and {name} would have one",
                key="actor_train.model_args.lora_target",
                hint="names of other layers, such as [q_proj, k_proj, v_proj, o_proj], or one device",
            )
    return found


def _as_held(model: Any, settings: LocalSettings) -> LocalSettings:
    """On the host, and in full precision where it is trained."""
    trained = any(one.requires_grad for one in model.parameters())
    precision = "fp32" if settings.precision == "bf16" and trained else settings.precision
    return replace(settings, device="cpu", precision=precision)


def _cut(
    model: Any,
    backbone: Any,
    numbers: Callable[[Tensor, Tensor], tuple[Tensor, ...]],
    cut: Cut,
    settings: LocalSettings,
) -> Root:
    """`model` in pieces, behind what gathers them."""
    if cut.context is not None:
        context.prepare(backbone)
    layers = blocks_of(backbone)
    if cut.tensor is not None:
        split_layers(layers, backbone.config, cut.tensor)
    root = Root(model, backbone, numbers, cut)
    half = settings.precision == "bf16"
    policy = (
        MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32) if half else MixedPrecisionPolicy()
    )
    for module in (*layers, root):
        fully_shard(module, mesh=cut.shard, reshard_after_forward=True, mp_policy=policy)
    for module in root.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)  # denominators are those of the whole batch already
            module.set_force_sum_reduction_for_comms(True)  # gloo knows no other
    return root


def blocks_of(backbone: Any) -> list[nn.Module]:
    """The layers, as the architecture names what must stay on one device."""
    names = set(backbone._no_split_modules or ())
    return [module for module in backbone.modules() if type(module).__name__ in names]
