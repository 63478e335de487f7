"""The model of a trainer: packed trees in, log-probabilities of chosen tokens out.

Guarantees: no dropout, no padding, no logits beyond a chunk; tied embeddings are one tensor. A model whose tokens
interact elsewhere than in attention (recurrent layers, for instance) computes the sequences of a pack one by one, which
is slow, and one line says so. A model whose packed forward pass differs from its plain one is refused
when the `PolicyModel` is made, by a trial. `weights` are detached tensors under the names of `transformers`, with LoRA
merged.

The work of a step is counted as six operations for every active weight and packed token, four for a frozen one.
Recomputation does not count, and neither does attention, which is little at the usual lengths. An embedding that is
only looked up does not compute.

Legend: L tokens of a pack, N actions, V vocabulary.
"""

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import rms_norm
from torch.utils.checkpoint import checkpoint

from headway.algorithms.capped_logprobs import compute_capped_logps, read_logit_transform
from headway.algorithms.logprobs import TokenLogps, compute_token_logps
from headway.errors import ConfigError
from headway.models.expert_routing import find_mixture, install_replay, replay_routing
from headway.models.model_checks import find_attention_problem, print_once
from headway.trainers.local import layer_functions, lora, tree_attention
from headway.trainers.local.activation_offload import ActivationOffload
from headway.trainers.local.fused_layers import ActivationPolicy, fuse_decoder_layers, is_fused
from headway.trainers.local.settings import LocalSettings, Precision
from headway.trainers.local.token_batch import TokenRow
from headway.trainers.local.tree_packing import TokenPack, pack_rows

COMPUTE_DTYPES: Mapping[Precision, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp64": torch.float64}
"""Types of the weights in forward and backward passes."""
_LARGEST_DIFFERENCE = 1e-3
"""Largest accepted difference between log-probabilities of the plain and the packed pass, in fp32."""


class PolicyModel:
    """A causal language model for training or scoring."""

    def __init__(self, model: Any, settings: LocalSettings, *, adapters: bool = True) -> None:
        self.causal = prepare_model(model, settings)
        self._peft: Any = None
        if settings.lora is not None and adapters:
            self._peft = lora.attach_adapters(self.causal, settings.lora)
        self._settings = settings
        self.backbone = self.causal.base_model
        self.head: nn.Linear = self.causal.get_output_embeddings()
        self.vocabulary = int(self.head.weight.shape[0])
        self.replays_routing = settings.routing_replay and install_replay(self.causal)
        """Whether the model is a mixture that computes with the experts of the engine."""
        if settings.routing_replay and not self.replays_routing and find_mixture(self.causal) is not None:
            kind = type(self.causal).__name__
            print_once(f"{kind} does not choose its experts by topk: the trainer routes by itself (routing_replay)")
        self._logit_transform = read_logit_transform(self.causal.config.get_text_config())
        self._check_packed_forward()

    def logps(self, pack: TokenPack) -> TokenLogps:
        """Return log-probabilities and entropies of every action of `pack`."""
        return self._logps_of_hidden(compute_hidden_states(self.backbone, pack)[pack.before_N], pack.chosen_N)

    def gradient_norms(self, pack: TokenPack) -> Tensor:
        """Return ‖onehot − π‖² = 1 − 2π + Σπ² of every action of `pack`: how far it moves the logits."""
        return self._norms_of_hidden(compute_hidden_states(self.backbone, pack)[pack.before_N], pack.chosen_N)

    def _norms_of_hidden(self, hidden_NH: Tensor, chosen_N: Tensor) -> Tensor:
        logp_N = self._logps_of_hidden(hidden_NH, chosen_N).logp_N
        sharp_N = self._logps_of_hidden(hidden_NH, chosen_N, sharpness=2.0).logp_N
        # With logits twice as large a token has π²/Σπ², so that Σπ² is π² over that.
        return 1.0 - 2.0 * logp_N.exp() + (2.0 * logp_N - sharp_N).exp()

    def _logps_of_hidden(self, hidden_NH: Tensor, chosen_N: Tensor, sharpness: float = 1.0) -> TokenLogps:
        temperature, change, bias_V = self._settings.temperature / sharpness, self._logit_transform, self.head.bias
        if change.cap:
            return compute_capped_logps(
                hidden_NH, self.head.weight, chosen_N, bias_V=bias_V, temperature=temperature, transform=change
            )
        return compute_token_logps(
            hidden_NH,
            self.head.weight,
            chosen_N,
            bias_V=bias_V,
            temperature=temperature / change.scale,
            keep=not self.activations.recompute and not self._settings.objective.entropy_coef,
        )

    @property
    def activations(self) -> ActivationPolicy:
        """What happens to activations between forward and backward pass."""
        return get_activation_policy(self.backbone)

    def save_memory(self) -> str | None:
        """Keep fewer activations on the device from now on, and return what changes; None if nothing is left to do."""
        if not self.activations.recompute:
            enable_recomputation(self.causal)
            return "activations are recomputed"
        if not self.activations.offload and self.head.weight.is_cuda:
            self.activations.offload = True
            return "activations go through host memory"
        return None

    def trainable(self) -> dict[str, nn.Parameter]:
        """Return the parameters that the optimizer changes, by name."""
        return {name: one for name, one in self.causal.named_parameters() if one.requires_grad}

    def weights(self) -> dict[str, Tensor]:
        """Return all weights by the names of `transformers`, each tensor once; live, or merged copies with LoRA."""
        if self._peft is not None:
            return lora.merge_adapters(self.causal)
        return lora.drop_tied_duplicates(self.causal.state_dict())

    def published_weights(self) -> dict[str, Tensor]:
        """Return what engines get as a version: all weights, or adapters alone where engines have the base."""
        if self._peft is not None and self._settings.lora is not None and self._settings.lora.separate:
            return lora.list_adapter_tensors(self.causal)
        return self.weights()

    def without_adapters(self) -> AbstractContextManager[Any]:
        """Switch the adapters off inside the context, so that the model is the initial one."""
        if self._peft is None:
            raise ConfigError("only LoRA can be switched off", key="lora", value=None)
        found: AbstractContextManager[Any] = self._peft.disable_adapter()
        return found

    def _check_packed_forward(self) -> None:
        """Raise `ConfigError` unless two members after one prompt have the same log-probabilities packed and plain."""
        lines = [tuple(number % self.vocabulary for number in line) for line in ((3, 1, 4, 1, 5), (3, 1, 9, 2))]
        rows = [
            TokenRow(sample_id="probe", group=0, tokens=line, actions=tuple(range(2, len(line))), first=3 * index)
            for index, line in enumerate(lines)
        ]
        device, worst = self._settings.device, 0.0
        with torch.no_grad():
            packed_N = self.logps(pack_rows(rows, budget=100, device=device)[0]).logp_N
            for row in rows:
                part_N = packed_N[row.first : row.first + len(row.actions)]
                ids = torch.tensor([row.tokens], device=device)
                logits_LV = self.causal(input_ids=ids, use_cache=False).logits[0]
                plain_LV = (logits_LV.to(part_N.dtype) / self._settings.temperature).log_softmax(-1)
                plain_N = plain_LV[[place - 1 for place in row.actions], [row.tokens[place] for place in row.actions]]
                worst = max(worst, float((plain_N - part_N).abs().max()))
        limit = _LARGEST_DIFFERENCE
        if self._settings.precision == "bf16":  # every layer rounds
            limit *= 100 * max(1.0, self.causal.config.get_text_config().num_hidden_layers / 16)
        if not worst < limit:
            kind = type(self.causal).__name__
            raise ConfigError(f"{kind}: its packed log-probabilities are {worst:.2g} off, so it cannot be trained here")


class CriticModel(nn.Module):
    """A decoder with one number per token instead of logits; the head starts at zero."""

    def __init__(self, model: Any, settings: LocalSettings) -> None:
        super().__init__()
        self.backbone = prepare_model(model, settings).base_model
        first = next(self.backbone.parameters())
        size = self.backbone.config.get_text_config().hidden_size
        wide = torch.promote_types(first.dtype, torch.float32)
        self.value = nn.Linear(size, 1, dtype=wide, device=first.device)
        nn.init.zeros_(self.value.weight)
        nn.init.zeros_(self.value.bias)

    def values(self, pack: TokenPack) -> Tensor:
        """Return the value of the state before every action of `pack`, [N]."""
        hidden_NH = compute_hidden_states(self.backbone, pack)[pack.before_N]
        found: Tensor = self.value(hidden_NH.to(self.value.weight.dtype)).squeeze(-1)
        return found


def prepare_model(model: Any, settings: LocalSettings) -> Any:
    """Put `model` into the configured precision and place, with tree attention and, if configured, checkpointing.

    Nothing random is left (dropout, jitter of routers): only modules that checkpoint are in training mode.
    """
    problem = find_attention_problem(model)
    if problem is not None:
        print_once(f"{type(model).__name__} is trained slowly, one sequence after the other: {problem}")
    tree_attention.register_tree_attention()
    model.to(device=settings.device)
    for one in model.parameters():  # buffers keep their type: angles of rotary embeddings must not be rounded
        if one.is_floating_point():  # weights in 4 bits are bytes
            one.data = one.data.to(COMPUTE_DTYPES[settings.precision])
    if problem is None:
        model.set_attn_implementation(tree_attention.TREE_ATTENTION)
    policy = ActivationPolicy(recompute=False, offload=settings.activation_offload)
    model.base_model.headway_activations = policy
    install_fused_kernels(model, settings if problem is None else replace(settings, fused_layers=False))
    model.eval()
    if settings.gradient_checkpointing:
        enable_recomputation(model)
    for module in model.modules():
        for name in [name for name in vars(module) if "dropout" in name]:
            if isinstance(getattr(module, name), float):  # layers that checkpoint and apply dropout themselves
                setattr(module, name, 0.0)
    return model


def install_fused_kernels(model: Any, settings: LocalSettings) -> None:
    """Let `model` compute by fused kernels what it can, on the device and in the precision of `settings`."""
    device, dtype = torch.device(settings.device), COMPUTE_DTYPES[settings.precision]
    if device.type == "cuda":
        fuse_rms_norms(model)
    if not settings.fused_layers or not tree_attention.has_flash(device, dtype):
        return
    if not layer_functions.has_kernels(device, dtype):
        print_once("layers are computed as transformers does it, without fused kernels: triton is not installed")
        return
    fuse_decoder_layers(model, get_activation_policy(model.base_model))


def enable_recomputation(model: Any) -> None:
    """Let `model` recompute activations in the backward pass. Fused layers do it by themselves."""
    get_activation_policy(model.base_model).recompute = True
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    for module in model.modules():
        if is_fused(module):
            module.gradient_checkpointing = False
        module.training = bool(getattr(module, "gradient_checkpointing", False))


def get_activation_policy(backbone: Any) -> ActivationPolicy:
    """Return what `prepare_model` has attached to a model."""
    found: ActivationPolicy = backbone.headway_activations
    return found


def compute_hidden_states(backbone: Any, pack: TokenPack) -> Tensor:
    """Return the last hidden states of all tokens of a pack, [L, H]."""
    replay_routing(backbone, pack.routing_L)
    if backbone.config.get_text_config()._attn_implementation != tree_attention.TREE_ATTENTION:
        return _compute_each_sequence(backbone, pack)
    spans = tree_attention.make_attention_spans(pack, next(backbone.parameters()).dtype)
    offloads = get_activation_policy(backbone).offload and pack.token_L.is_cuda and torch.is_grad_enabled()
    with ActivationOffload(backbone) if offloads else nullcontext():
        out = backbone(
            input_ids=pack.token_L[None],
            position_ids=pack.position_L[None],
            use_cache=False,
            headway_trees=pack.trees,
            headway_spans=spans,
        )
    hidden: Tensor = out.last_hidden_state[0]
    return hidden


def _compute_each_sequence(backbone: Any, pack: TokenPack) -> Tensor:
    """Return the last hidden states of a pack whose sequences never meet in a forward pass, [L, H]."""
    parts = []
    for prompt, own in (pair for tree in pack.trees for pair in tree.sequences()):
        at = torch.tensor([*prompt, *own], device=pack.token_L.device)
        routing = None if pack.routing_L is None else pack.routing_L[at]
        arguments = backbone, pack.token_L[at], routing
        if routing is not None and torch.is_grad_enabled():  # layers that are computed again need their own experts
            hidden = checkpoint(_compute_sequence, *arguments, use_reentrant=False)
        else:
            hidden = _compute_sequence(*arguments)
        parts.append(hidden[len(prompt) :])
    return torch.cat(parts)


def _compute_sequence(backbone: Any, token_T: Tensor, routing_T: Tensor | None) -> Tensor:
    replay_routing(backbone, routing_T)
    hidden_TH: Tensor = backbone(input_ids=token_T[None], use_cache=False).last_hidden_state[0]
    return hidden_TH


PEAK_TFLOPS: Mapping[str, float] = {
    "B200": 2250.0,
    "H200": 989.0,
    "H100": 989.0,
    "A100": 312.0,
    "L40S": 362.0,
    "RTX 4090": 165.0,
    "RTX 3090": 71.0,
}
"""Dense bf16 TFLOP/s of GPUs, by a part of their name."""


def count_token_operations(model: Any) -> int:
    """Return the operations of a step for each token: six for every weight, four where it has no gradient."""
    head = model.get_output_embeddings().weight
    inside = {id(model.get_input_embeddings().weight)} - {id(head)}
    counted = [one for one in model.parameters() if id(one) not in inside]
    return sum((6 if one.requires_grad else 4) * lora.get_shape(one).numel() for one in counted)


def peak_tflops(device: str) -> float | None:
    """Return the peak TFLOP/s of the device; None if it is not known."""
    if torch.device(device).type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for part, peak in PEAK_TFLOPS.items() if part in name), None)


def fuse_rms_norms(model: nn.Module) -> int:
    """Replace root-mean-square norms in `model` by one kernel each, and return how many were replaced.

    `transformers` computes a norm in about eight kernels. A norm is replaced only if the single kernel gives the same
    up to rounding on its weights; norms that add one to their weights, for instance, are left alone.
    """
    done = 0
    for module in model.modules():
        eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
        weight = getattr(module, "weight", None)
        if type(module).__name__.endswith("RMSNorm") and isinstance(weight, Tensor) and isinstance(eps, float):
            done += _replace_if_equal(module, eps)
    return done


@torch.no_grad()
def _replace_if_equal(module: Any, eps: float) -> bool:
    generator = torch.Generator(module.weight.device).manual_seed(0)
    shape = (4, *module.weight.shape)
    x = torch.randn(shape, generator=generator, device=module.weight.device, dtype=torch.float32) * 3
    x = x.to(module.weight.dtype)

    def forward(hidden_states: Tensor) -> Tensor:
        return rms_norm(hidden_states, module.weight.shape, module.weight, eps)

    limit = 4 * torch.finfo(x.dtype).eps
    if not torch.allclose(forward(x).float(), module(x).float(), rtol=limit, atol=limit):
        return False
    module.forward = forward
    return True
