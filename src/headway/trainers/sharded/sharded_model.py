"""Which weights of a decoder's layers are cut by columns and which by rows, for ranks that share layers.

Queries, keys, values and the way up are cut by columns (heads stay whole), what follows them by rows, and the sum over
ranks is what the next layer sees. Embeddings, norms and the head are not cut: every rank of the mesh has them whole.
A layer that has a matrix under any other name is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from headway.algorithms import TokenLogps, compute_token_logps
from headway.errors import ConfigError
from headway.trainers.local import lora, norms
from headway.trainers.local.policy_model import CriticModel, PolicyModel, compute_hidden_states
from headway.trainers.local.settings import LocalSettings
from headway.trainers.local.tree_packing import TokenPack
from headway.trainers.sharded import context_parallel
from headway.trainers.sharded.sharded_optimizer import gather_full_tensor

COLUMN_PARALLEL = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
ROW_PARALLEL = ("o_proj", "down_proj")
_KEY = "actor_train.strategy_args.strategy_config.tensor_model_parallel_size"


def parallelize_layers(layers: Sequence[nn.Module], config: Any, mesh: DeviceMesh) -> None:
    """Cut every layer over `mesh`. Raises `ConfigError` where a layer cannot be cut."""
    check_tensor_parallel(config, mesh.size())
    for layer in layers:
        parallelize_module(layer, mesh, make_parallel_plan(layer, mesh.size()))


def make_parallel_plan(layer: nn.Module, size: int) -> dict[str, ParallelStyle]:
    """How each matrix of a layer is cut. Raises `ConfigError` where it is not known of one."""
    plan: dict[str, ParallelStyle] = {}
    for name, module in layer.named_modules():
        last = name.rpartition(".")[2]
        if isinstance(module, nn.Linear) and last in COLUMN_PARALLEL:
            plan[name] = ColwiseParallel()
        elif isinstance(module, nn.Linear) and last in ROW_PARALLEL:
            plan[name] = RowwiseParallel()
    for name, one in layer.named_parameters():
        if one.ndim >= 2 and name.rpartition(".")[0] not in plan:
            problem = f"{type(layer).__name__}.{name} is neither cut by columns nor by rows"
            raise ConfigError(problem, key=_KEY, value=size, hint="1")
    return plan


def check_tensor_parallel(config: Any, size: int) -> None:
    """Whether heads and the inner width come out even. Raises `ConfigError`."""
    heads = getattr(config, "num_attention_heads", 0)
    counts = {
        "num_attention_heads": heads,
        "num_key_value_heads": getattr(config, "num_key_value_heads", heads),
        "intermediate_size": getattr(config, "intermediate_size", 0),
    }
    for name, count in counts.items():
        if not count or count % size:
            problem = f"{name} of the model is {count}, which {size} ranks cannot share"
            raise ConfigError(problem, key=_KEY, value=size, hint="a divisor of all of them, or 1")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ShardingMeshes:
    """How a model is cut."""

    shard: DeviceMesh
    tensor: DeviceMesh | None
    """Ranks that share layers."""
    context: Any
    """The group of ranks that share sequences; None: nobody does."""


class ShardedForward(nn.Module):
    """What `fully_shard` sees as one model: from a pack to numbers of its actions.

    `numbers` makes them from hidden states and chosen tokens; everything that it reads is gathered meanwhile.
    """

    def __init__(
        self,
        model: nn.Module,
        backbone: Any,
        numbers: Callable[[Tensor, Tensor], tuple[Tensor, ...]],
        cut: ShardingMeshes,
    ) -> None:
        super().__init__()
        self.model = model
        self._backbone, self._numbers, self._group = [backbone], numbers, cut.context

    def forward(self, pack: TokenPack) -> tuple[Tensor, ...]:
        backbone = self._backbone[0]
        if self._group is None:
            return self._numbers(compute_hidden_states(backbone, pack)[pack.before_N], pack.chosen_N)
        part = context_parallel.make_context_shard(pack, self._group)
        hidden_nH = context_parallel.compute_shard_hidden_states(backbone, part)[part.before_n]
        found = self._numbers(hidden_nH, pack.chosen_N[part.mine_n])
        return tuple(context_parallel.scatter_to_all_ranks(one_n, part, pack.chosen_N.numel()) for one_n in found)


class ShardedPolicy(PolicyModel):
    """A policy of which every rank holds a piece; whole while it is made and tried."""

    def __init__(self, model: Any, settings: LocalSettings, cut: ShardingMeshes, *, adapters: bool = True) -> None:
        self._root: nn.Module | None = None
        super().__init__(model, _as_held(model, settings), adapters=adapters)
        self._settings = settings
        self._adapted = _adapted(self.causal)
        if torch.device(settings.device).type == "cuda":
            norms.fuse_rms_norms(self.causal)
        self._root = _cut(self.causal, self.backbone, self._numbers, cut, settings)
        self._shards = dict(self._named())

    def logps(self, pack: TokenPack) -> TokenLogps:
        if self._root is None:
            return super().logps(pack)
        logp_N, entropy_N = self._root(pack)
        return TokenLogps(logp_N=logp_N, entropy_N=entropy_N)

    def _numbers(self, hidden_NH: Tensor, chosen_N: Tensor) -> tuple[Tensor, ...]:
        found = compute_token_logps(
            hidden_NH, self.head.weight, chosen_N, bias_V=self.head.bias, temperature=self._settings.temperature
        )
        return found.logp_N, found.entropy_N

    def shards(self) -> dict[str, Tensor]:
        """All weights by their names, as pieces; with LoRA those of the layers under the adapters."""
        return self._shards

    def whole(self, name: str) -> Tensor:
        """One of `shards`, gathered and with its adapter; all ranks ask for the same at the same time."""
        found = gather_full_tensor(self._shards[name])
        layer = self._adapted.get(name)
        if layer is None:
            return found
        down, up = (gather_full_tensor(side[lora.ADAPTER_NAME].weight) for side in (layer.lora_A, layer.lora_B))
        more: Tensor = up @ down * layer.scaling[lora.ADAPTER_NAME]
        return found + (more.T if layer.fan_in_fan_out else more).to(found.dtype)

    def weights(self) -> dict[str, Tensor]:
        """All of them at once: for models that a host has room for."""
        return {name: self.whole(name) for name in self._shards}

    def _named(self) -> Iterator[tuple[str, Tensor]]:
        once = {name for name, _ in self.causal.named_parameters()} | {name for name, _ in self.causal.named_buffers()}
        for name, tensor in self.causal.state_dict().items():
            if name in once and ".lora_" not in name:  # the second name of a tied weight is not among them
                yield lora.strip_adapter_name(name), tensor


class ShardedCritic(CriticModel):
    """A critic of which every rank holds a piece."""

    _root: nn.Module

    def __init__(self, model: Any, settings: LocalSettings, cut: ShardingMeshes) -> None:
        super().__init__(model, _as_held(model, settings))
        fully_shard(self.value, mesh=cut.shard, reshard_after_forward=True)  # alone: computed in full precision
        root = _cut(self, self.backbone, self._numbers, cut, settings)
        object.__setattr__(self, "_root", root)  # not a part of what it is around

    def values(self, pack: TokenPack) -> Tensor:
        found: tuple[Tensor, ...] = self._root(pack)
        return found[0]

    def _numbers(self, hidden_NH: Tensor, chosen_N: Tensor) -> tuple[Tensor, ...]:
        return (self.value(hidden_NH.to(torch.promote_types(hidden_NH.dtype, torch.float32))).squeeze(-1),)


def _adapted(model: nn.Module) -> dict[str, Any]:
    """Layers with adapters, by the names of their weights. Raises `ConfigError` where they are not those of a layer."""
    found = lora.find_adapted_modules(model)
    for name, layer in found.items():
        if hasattr(layer, "parameter_name") or lora.ADAPTER_NAME not in layer.lora_A:
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
    cut: ShardingMeshes,
    settings: LocalSettings,
) -> ShardedForward:
    """`model` in pieces, behind what gathers them."""
    if cut.context is not None:
        context_parallel.enable_context_attention(backbone)
    layers = find_decoder_layers(backbone)
    if cut.tensor is not None:
        parallelize_layers(layers, backbone.config, cut.tensor)
    root = ShardedForward(model, backbone, numbers, cut)
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


def find_decoder_layers(backbone: Any) -> list[nn.Module]:
    """The layers, as the architecture names what must stay on one device."""
    names = set(backbone._no_split_modules or ())
    return [module for module in backbone.modules() if type(module).__name__ in names]
