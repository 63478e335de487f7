"""Models that are cut over ranks: layers by columns and rows, weights by `fully_shard`, sequences by context.

docs/sharding.md has a table of what is cut how. A layer that has a matrix under an unknown name is refused.

Guarantees: numbers and gradients are those of the whole model, up to rounding, and the same on every rank that computes
the same pack. Weights are held in float32, like the masters of a single process, and gathered layer by layer in the
precision of computation. A frozen model is held in that precision.

Legend: N actions of a pack, n those that follow a token of this rank, H hidden size.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from headway.algorithms.logprobs import TokenLogps
from headway.errors import ConfigError
from headway.models.model_checks import check_attention, print_once
from headway.trainers.local import lora
from headway.trainers.local.policy_model import CriticModel, PolicyModel, compute_hidden_states, install_fused_kernels
from headway.trainers.local.settings import LocalSettings
from headway.trainers.local.tree_packing import TokenPack
from headway.trainers.sharded import context_parallel
from headway.trainers.sharded.sharded_optimizer import gather_full_tensor
from headway.trainers.sharded.staged_collectives import is_staged, stage_shards

COLUMN_PARALLEL = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
ROW_PARALLEL = ("o_proj", "down_proj")
_KEY = "actor_train.strategy_args.strategy_config.tensor_model_parallel_size"


def parallelize_layers(layers: Sequence[nn.Module], config: Any, mesh: DeviceMesh) -> None:
    """Cut every layer over `mesh`. Raise `ConfigError` if a layer cannot be cut."""
    check_tensor_parallel(config, mesh.size())
    for layer in layers:
        parallelize_module(layer, mesh, make_parallel_plan(layer, mesh.size()))


def make_parallel_plan(layer: nn.Module, size: int) -> dict[str, ParallelStyle]:
    """Return how each matrix of a layer is cut. Raise `ConfigError` for a matrix with an unknown name."""
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
    """Raise `ConfigError` unless `size` divides the attention heads and the inner width."""
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
    """The meshes that a model is cut over."""

    shard: DeviceMesh
    tensor: DeviceMesh | None
    """Ranks that share layers."""
    context: Any
    """Process group of the ranks that share sequences; None without context parallelism."""


class ShardedForward(nn.Module):
    """The module that `fully_shard` treats as one model: it maps a pack to numbers of its actions.

    `compute_numbers` maps hidden states and chosen tokens to these numbers; the weights that it reads are gathered
    around the call.
    """

    def __init__(
        self,
        model: nn.Module,
        backbone: Any,
        compute_numbers: Callable[[Tensor, Tensor], tuple[Tensor, ...]],
        meshes: ShardingMeshes,
    ) -> None:
        super().__init__()
        self.model = model
        self._backbone, self._compute_numbers, self._group = [backbone], compute_numbers, meshes.context

    def forward(self, pack: TokenPack) -> tuple[Tensor, ...]:
        backbone = self._backbone[0]
        if self._group is None:
            return self._compute_numbers(compute_hidden_states(backbone, pack)[pack.before_N], pack.chosen_N)
        shard = context_parallel.make_context_shard(pack, self._group)
        hidden_nH = context_parallel.compute_shard_hidden_states(backbone, shard)[shard.before_n]
        found = self._compute_numbers(hidden_nH, pack.chosen_N[shard.number_n])
        return tuple(context_parallel.scatter_to_all_ranks(one_n, shard, pack.chosen_N.numel()) for one_n in found)


class ShardedWeights:
    """The weights of a policy of which every rank holds a shard."""

    _shards: dict[str, Tensor]
    _adapted: dict[str, Any]
    """Layers with adapters, by the names of their weights."""

    def _list_shards(self, model: nn.Module) -> None:
        """Remember the shards of a model that has been cut."""
        once = {name for name, _ in model.named_parameters()} | {name for name, _ in model.named_buffers()}
        self._shards = {
            lora.strip_adapter_name(name): tensor
            for name, tensor in model.state_dict().items()
            if name in once and ".lora_" not in name  # leaves out the second name of a tied weight
        }

    def shards(self) -> dict[str, Tensor]:
        """Return the shards of all weights by name; with LoRA those of the layers under the adapters."""
        return self._shards

    def gather_weight(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        """Return the full weight `name` with its adapter added; all ranks must ask for it at the same time.

        A weight without adapter is gathered in `dtype`, if it is given and the weight is a floating tensor.
        """
        layer, shard = self._adapted.get(name), self._shards[name]
        if layer is None:
            return gather_full_tensor(shard.to(dtype) if dtype and shard.is_floating_point() else shard)
        found = gather_full_tensor(shard)
        down, up = (gather_full_tensor(side[lora.ADAPTER_NAME].weight) for side in (layer.lora_A, layer.lora_B))
        more: Tensor = up @ down * layer.scaling[lora.ADAPTER_NAME]
        return found + (more.T if layer.fan_in_fan_out else more).to(found.dtype)

    def weights(self) -> dict[str, Tensor]:
        """Return all full weights at once, for models that fit into host memory."""
        return {name: self.gather_weight(name) for name in self._shards}


class ShardedPolicy(ShardedWeights, PolicyModel):
    """A policy of which every rank holds a shard. It is whole while it is made and tried."""

    def __init__(self, model: Any, settings: LocalSettings, meshes: ShardingMeshes, *, adapters: bool = True) -> None:
        check_attention(model)
        self._root: nn.Module | None = None
        self._counts_norms = False
        """Whether the forward pass returns gradient norms instead of log-probabilities."""
        super().__init__(model, _host_settings(model, settings), adapters=adapters)
        self._settings = settings
        self._adapted = find_adapted_layers(self.causal)
        if self.activations.offload:
            print_once("activation_offload has no effect where a model is cut over ranks")
            self.activations.offload = False
        install_fused_kernels(self.causal, settings)
        self._root = _shard_model(self.causal, self.backbone, self._compute_numbers, meshes, settings)
        self._list_shards(self.causal)

    def logps(self, pack: TokenPack) -> TokenLogps:
        if self._root is None:
            return super().logps(pack)
        logp_N, entropy_N = self._root(pack)
        return TokenLogps(logp_N=logp_N, entropy_N=entropy_N)

    def gradient_norms(self, pack: TokenPack) -> Tensor:
        if self._root is None:
            return super().gradient_norms(pack)
        self._counts_norms = True
        try:
            found: tuple[Tensor, ...] = self._root(pack)
        finally:
            self._counts_norms = False
        return found[0]

    def _compute_numbers(self, hidden_NH: Tensor, chosen_N: Tensor) -> tuple[Tensor, ...]:
        if self._counts_norms:
            return (self._norms_of_hidden(hidden_NH, chosen_N),)
        found = self._logps_of_hidden(hidden_NH, chosen_N)
        return found.logp_N, found.entropy_N


class ShardedCritic(CriticModel):
    """A critic of which every rank holds a shard."""

    _root: nn.Module

    def __init__(self, model: Any, settings: LocalSettings, meshes: ShardingMeshes) -> None:
        super().__init__(model, _host_settings(model, settings))
        fully_shard(
            self.value, mesh=meshes.shard, reshard_after_forward=True
        )  # separately, because it is computed in full precision
        root = _shard_model(self, self.backbone, self._compute_numbers, meshes, settings)
        object.__setattr__(self, "_root", root)  # not registered as a submodule of what it contains

    def values(self, pack: TokenPack) -> Tensor:
        found: tuple[Tensor, ...] = self._root(pack)
        return found[0]

    def _compute_numbers(self, hidden_NH: Tensor, chosen_N: Tensor) -> tuple[Tensor, ...]:
        return (self.value(hidden_NH.to(torch.promote_types(hidden_NH.dtype, torch.float32))).squeeze(-1),)


def find_adapted_layers(model: nn.Module) -> dict[str, Any]:
    """Return layers with adapters by the names of their weights. Raise `ConfigError` if one cannot be cut."""
    found = lora.find_adapted_modules(model)
    for name, layer in found.items():
        if hasattr(layer, "parameter_name") or lora.ADAPTER_NAME not in layer.lora_A:
            raise ConfigError(
                f"adapters of experts and embeddings cannot be cut over ranks, and {name} would have one",
                key="actor_train.model_args.lora_target",
                hint="names of other layers, such as [q_proj, k_proj, v_proj, o_proj], or one device",
            )
    return found


def _host_settings(model: Any, settings: LocalSettings) -> LocalSettings:
    """Return settings for the host, in full precision if the model is trained."""
    trained = any(one.requires_grad for one in model.parameters())
    precision = "fp32" if settings.precision == "bf16" and trained else settings.precision
    return replace(settings, device="cpu", precision=precision)


def _shard_model(
    model: Any,
    backbone: Any,
    compute_numbers: Callable[[Tensor, Tensor], tuple[Tensor, ...]],
    meshes: ShardingMeshes,
    settings: LocalSettings,
) -> ShardedForward:
    """Cut `model` into shards and return the module that gathers them."""
    if meshes.context is not None:
        context_parallel.enable_context_attention(backbone)
    layers = find_decoder_layers(backbone)
    if meshes.tensor is not None:
        parallelize_layers(layers, backbone.config, meshes.tensor)
    root = ShardedForward(model, backbone, compute_numbers, meshes)
    half = settings.precision == "bf16"
    policy = (
        MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32) if half else MixedPrecisionPolicy()
    )
    cut_modules(root, layers, meshes.shard, policy)
    return root


def cut_modules(root: nn.Module, layers: Sequence[nn.Module], mesh: DeviceMesh, policy: MixedPrecisionPolicy) -> None:
    """Cut `root` into shards, which are gathered layer by layer. Gradients are sums over the ranks."""
    for module in (*layers, root):
        fully_shard(module, mesh=mesh, reshard_after_forward=True, mp_policy=policy)
    for module in root.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)  # denominators are those of the whole batch already
            module.set_force_sum_reduction_for_comms(True)  # the only reduction that gloo has
            if is_staged(mesh.device_type):
                stage_shards(module)


def find_decoder_layers(backbone: Any) -> list[nn.Module]:
    """Return the layers: the modules that the architecture wants to keep on one device."""
    names = set(backbone._no_split_modules or ())
    return [module for module in backbone.modules() if type(module).__name__ in names]
