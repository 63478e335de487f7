"""The routing of mixtures of experts: engines record which experts each token went to, trainers compute with the same.

Near ties go to other experts in another precision, and then log-probabilities differ by far more than rounding. A
trainer that replays the engine's choice is as close to it as a dense model is. The weights of the chosen experts are
those of the trainer's own router, so that gradients flow through it.

`RoutingRecorder` reads the choice where a layer hands it to its experts. `install_replay` lets the blocks of a model
answer `torch.topk` over all experts with the recorded choice, whatever the family does before and after it. Models that
choose in another way (a router without `topk`) are found by a trial and route by themselves.

Shapes: T tokens, M layers with experts, K experts of a token.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from headway.types import ExpertRouting

if TYPE_CHECKING:
    from numpy.typing import NDArray

_COUNT_NAMES = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts")
_DTYPES = {1: (torch.uint8, "u1"), 2: (torch.int16, "<u2")}
"""Types in torch and numpy by bytes; the one with all bits set means that an expert is not known."""


class Mixture(NamedTuple):
    """The layers of a model that have experts."""

    blocks: list[nn.Module]
    """Modules that choose experts and call them, in the order of layers."""
    experts: list[nn.Module]
    per_token: int
    width: int
    """Bytes of an expert's number."""


def find_mixture(model: nn.Module) -> Mixture | None:
    """Return the layers with experts; None if there are none, or they do not say how many experts a token has."""
    config = model.config.get_text_config()  # type: ignore[operator, union-attr]
    per_token = next((value for name in _COUNT_NAMES if (value := getattr(config, name, None))), None)
    blocks, experts = [], []
    for module in model.modules():
        for child in module.children():
            if type(child).__name__.endswith("Experts") and hasattr(child, "num_experts"):
                blocks.append(module)
                experts.append(child)
    if not experts or not isinstance(per_token, int):
        return None
    most = max(int(child.num_experts) for child in experts)  # type: ignore[arg-type]
    return Mixture(blocks, experts, per_token, 1 if most < 255 else 2)


class RoutingRecorder:
    """Writes the experts of every forward pass to `store`, one row for each token, at `rows`."""

    def __init__(self, mixture: Mixture) -> None:
        self._shape = len(mixture.experts), mixture.per_token
        self._width = mixture.width
        self.store: Tensor | None = None
        """(rows, M, K)."""
        self.rows: Tensor | None = None
        """Rows of the tokens of the next forward pass; None records nothing."""
        self._hooks = [
            experts.register_forward_pre_hook(self._make_hook(number)) for number, experts in enumerate(mixture.experts)
        ]

    def make_store(self, rows: int, device: torch.device | str = "cpu") -> Tensor:
        """Return memory for so many tokens, in which no expert is known."""
        dtype, unknown = _DTYPES[self._width][0], 255 if self._width == 1 else -1
        return torch.full((rows, *self._shape), unknown, dtype=dtype, device=device)

    def _make_hook(self, number: int) -> Callable[[nn.Module, tuple[Any, ...]], None]:
        def note(module: nn.Module, inputs: tuple[Any, ...]) -> None:
            chosen = inputs[1] if len(inputs) > 1 else None
            if self.rows is None or self.store is None or not isinstance(chosen, Tensor):
                return
            if chosen.shape == (len(self.rows), self._shape[1]):
                self.store[:, number].index_copy_(0, self.rows, chosen.to(self.store.dtype))

        return note

    def detach(self) -> None:
        """Record nothing from now on."""
        for hook in self._hooks:
            hook.remove()

    def pack(self, rows: Tensor, start: int) -> ExpertRouting | None:
        """Return rows of a store, (T, M, K), whose first token stands at `start`; None if there are none."""
        if not len(rows):
            return None
        data = rows.contiguous().cpu().numpy().tobytes()
        layers, experts = self._shape
        return ExpertRouting(start=start, layers=layers, experts=experts, width=self._width, data=data)


def unpack_routing(routing: ExpertRouting) -> NDArray[np.int32]:
    """Return the experts of each token, (T, M, K); −1 where they are not known."""
    kind = np.dtype(_DTYPES[routing.width][1])
    found = np.frombuffer(routing.data, dtype=kind).reshape(len(routing), routing.layers, routing.experts)
    return np.where(found == np.iinfo(kind).max, -1, found.astype(np.int32))


class ReplayedBlock:
    """Replaces the forward pass of a block: top-k over all experts returns `experts_TK` where they are known."""

    def __init__(self, forward: Callable[..., Any], experts: int, per_token: int) -> None:
        self._forward = forward
        self._experts, self._per_token = experts, per_token
        self.experts_TK: Tensor | None = None
        """The choice; −1 leaves a token to the block. It stays, because checkpointing computes a layer again."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.experts_TK is None:
            return self._forward(*args, **kwargs)
        with _ReplayedTopK(self.experts_TK, self._experts):
            return self._forward(*args, **kwargs)


class _ReplayedTopK(TorchFunctionMode):
    def __init__(self, chosen: Tensor, experts: int) -> None:
        super().__init__()
        self._chosen = chosen
        self._experts = experts

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if func not in (torch.topk, Tensor.topk) or found.indices.shape != self._chosen.shape:
            return found
        scores = args[0] if args else kwargs["input"]
        if scores.shape[-1] != self._experts:
            return found
        indices = torch.where(self._chosen < 0, found.indices, self._chosen)
        return torch.return_types.topk((scores.gather(-1, indices), indices))


def install_replay(model: nn.Module) -> bool:
    """Let the blocks of a mixture replay what `replay_routing` gives them; returns whether they can."""
    mixture = find_mixture(model)
    if mixture is None:
        return False
    for block, experts in zip(mixture.blocks, mixture.experts, strict=True):
        block.forward = ReplayedBlock(block.forward, int(experts.num_experts), mixture.per_token)  # type: ignore[arg-type]
    if _try_replay(model, mixture):
        return True
    for block in mixture.blocks:
        block.forward = block.forward._forward  # type: ignore[attr-defined]
    return False


def replay_routing(model: nn.Module, chosen: Tensor | None) -> None:
    """Give every block the experts of the next forward pass, (T, M, K); None lets the model route by itself."""
    found = [block for module in model.modules() if isinstance(block := module.__dict__.get("forward"), ReplayedBlock)]
    for number, block in enumerate(found):
        block.experts_TK = None if chosen is None else chosen[:, number].long()


@torch.no_grad()
def _try_replay(model: nn.Module, mixture: Mixture) -> bool:
    """Return whether experts get what is replayed, tried with a choice that no router makes."""
    device = next(model.parameters()).device
    tokens = torch.zeros(1, 2, dtype=torch.long, device=device)
    wanted = torch.arange(mixture.per_token, device=device).flip(0).expand(2, len(mixture.blocks), -1)
    recorder = RoutingRecorder(mixture)
    recorder.store, recorder.rows = recorder.make_store(2, device), torch.arange(2, device=device)
    replay_routing(model, wanted)
    try:
        model(input_ids=tokens, use_cache=False)
    finally:
        replay_routing(model, None)
        recorder.detach()
    return bool((recorder.store.long() == wanted).all())
