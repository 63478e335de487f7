"""AdamW over named parameters: the clip that refuses, the step, and a state that is plain tensors.

Guarantees: `ready` changes no weight and raises `TrainerError` where a gradient is NaN or infinite; state round trips
bit for bit through `tensors` and `overwrite_tensors`. State exists from the start, so a first step allocates nothing new.
With `offload` moments live in the memory of the host and visit the device a few parameters at a time; the numbers are
the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext

import torch
from torch import Tensor, nn

from headway.errors import TrainerError
from headway.trainers.local.settings import OptimizerSettings

_MOMENTS = ("step", "exp_avg", "exp_avg_sq")
_LARGE = _MOMENTS[1:]
_VISIT_BYTES = 512 * 1024**2
"""Of moments that are on the device at a time, where they live on the host."""


class Optimizer:
    """AdamW; decay on matrices only.

    A parameter in half precision has a master in float32, which is what moves: its gradients are added up there, micro-
    batch after micro-batch, and the parameter is the master rounded.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], settings: OptimizerSettings) -> None:
        self._live = dict(parameters)
        self._settings = settings
        self._parameters = {name: _master(one) for name, one in self._live.items()}
        visits = _visits(self._parameters.values()) if settings.offload else [list(self._parameters.values())]
        self._adams = [_adam(visit, settings) for visit in visits]
        self._state = {one: adam.state[one] for adam, visit in zip(self._adams, visits, strict=True) for one in visit}

    def ready(self, what: str) -> float:
        """Clip the gradients; returns their norm before. Raises where they are not finite."""
        for one in self._parameters.values():
            if one.grad is None:
                one.grad = torch.zeros_like(one)
        norm = self._norm()
        if not bool(norm.isfinite()):
            bad = [name for name, one in self._parameters.items() if not bool(one.grad.isfinite().all())]  # type: ignore[union-attr]
            raise TrainerError(f"{what}: gradient of {', '.join(bad[:3]) or 'all'} is not finite")
        nn.utils.clip_grads_with_norm_(self._parameters.values(), self._settings.max_grad_norm, norm)
        return float(norm)

    def _norm(self) -> Tensor:
        """Of all gradients together."""
        return nn.utils.get_total_norm([one.grad for one in self._parameters.values() if one.grad is not None])

    def step(self, version: int) -> float:
        """Move the weights, at the rate of `version`, which is returned."""
        rate = self._settings.rate_at(version)
        for adam in self._adams:
            for group in adam.param_groups:
                group["lr"] = rate
            with _visiting(adam) if self._settings.offload else nullcontext():
                adam.step()
        self._round()
        return rate

    @torch.no_grad()
    def _round(self) -> None:
        """Parameters follow their masters."""
        pairs = [(live, self._parameters[name]) for name, live in self._live.items()]
        halves = [(live.data, master.data) for live, master in pairs if live is not master]
        if halves:
            torch._foreach_copy_([live for live, _ in halves], [master for _, master in halves])

    def forget(self) -> None:
        """Let the gradients go."""
        for adam in self._adams:
            adam.zero_grad(set_to_none=True)

    def tensors(self) -> dict[str, Tensor]:
        """The whole state, live, by `<parameter>/<moment>` and `<parameter>/master`."""
        found = {
            f"{name}/{moment}": self._state[one][moment]
            for name, one in self._parameters.items()
            for moment in _MOMENTS
        }
        for name, one in self._parameters.items():
            if one is not self._live[name]:
                found[f"{name}/master"] = one.data
        return found

    def everything(self) -> dict[str, Tensor]:
        """State and parameters, live: what a step changes."""
        return {**self.tensors(), **{name: one.data for name, one in self._live.items()}}


def _visits(parameters: Iterable[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Parameters whose moments are on the device together."""
    found: list[list[nn.Parameter]] = []
    room = 0
    for one in parameters:
        size = len(_LARGE) * one.numel() * one.element_size()
        if size > room:
            found.append([])
            room = _VISIT_BYTES
        found[-1].append(one)
        room -= size
    return found


def _adam(parameters: Sequence[nn.Parameter], settings: OptimizerSettings) -> torch.optim.AdamW:
    """With all of its state."""
    groups = [
        {"params": [one for one in parameters if one.ndim >= 2], "weight_decay": settings.weight_decay},
        {"params": [one for one in parameters if one.ndim < 2], "weight_decay": 0.0},
    ]
    adam = torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=settings.learning_rate,
        betas=settings.betas,
        eps=settings.epsilon,
        fused=True,
    )
    for one in parameters:
        adam.state[one] = {"step": torch.zeros((), dtype=torch.float32, device=one.device)}
        adam.state[one] |= {moment: _zeros_like(one, host=settings.offload) for moment in _LARGE}
    return adam


def _zeros_like(one: nn.Parameter, *, host: bool) -> Tensor:
    if not host:
        return torch.zeros_like(one)
    return torch.zeros(one.shape, dtype=one.dtype, pin_memory=one.is_cuda)


@contextmanager
def _visiting(adam: torch.optim.AdamW) -> Iterator[None]:
    """Moments are on the device inside, and on the host again afterwards."""
    homes = {one: {moment: state[moment] for moment in _LARGE} for one, state in adam.state.items()}
    for one, home in homes.items():
        adam.state[one] |= {moment: tensor.to(one.device, non_blocking=True) for moment, tensor in home.items()}
    try:
        yield
    finally:
        for one, home in homes.items():
            for moment, tensor in home.items():
                tensor.copy_(adam.state[one][moment], non_blocking=True)
            adam.state[one] |= home
        if any(one.is_cuda for one in homes):
            torch.cuda.current_stream().synchronize()


def _master(live: nn.Parameter) -> nn.Parameter:
    """What moves in the place of `live`, with its gradients; itself where it is wide enough."""
    if live.dtype not in (torch.bfloat16, torch.float16):
        return live
    master = nn.Parameter(live.detach().float())

    def collect(_: Tensor) -> None:
        grad = live.grad
        if grad is None:
            return
        if master.grad is None:
            master.grad = grad.float()
        else:
            master.grad.add_(grad)
        live.grad = None

    live.register_post_accumulate_grad_hook(collect)  # type: ignore[no-untyped-call]
    return master


def copy_tensors(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """By value."""
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


def overwrite_tensors(live: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> None:
    """Put `values` into `live`, which must have the same names."""
    with torch.no_grad():
        for name, tensor in live.items():
            tensor.copy_(values[name])
