"""AdamW over named parameters: the clip that refuses, the step, and a state that is plain tensors.

Guarantees: `ready` changes no weight and raises `TrainerError` where a gradient is NaN or infinite; state round trips
bit for bit through `tensors` and `restore`. State exists from the start, so a first step allocates nothing new.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from headway.errors import TrainerError
from headway.trainers.local.settings import OptimizerSettings

_MOMENTS = ("step", "exp_avg", "exp_avg_sq")


class Optimizer:
    """AdamW; decay on matrices only.

    A parameter in half precision has a master in float32, which is what moves: its gradients are added up there, micro-
    batch after micro-batch, and the parameter is the master rounded.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], settings: OptimizerSettings) -> None:
        self._live = dict(parameters)
        self._settings = settings
        self._parameters = {name: _master(one) for name, one in self._live.items()}
        every = list(self._parameters.values())
        groups = [
            {"params": [one for one in every if one.ndim >= 2], "weight_decay": settings.weight_decay},
            {"params": [one for one in every if one.ndim < 2], "weight_decay": 0.0},
        ]
        self._adam = torch.optim.AdamW(
            [group for group in groups if group["params"]],
            lr=settings.learning_rate,
            betas=settings.betas,
            eps=settings.epsilon,
            fused=True,
        )
        for one in every:
            self._adam.state[one] = {
                "step": torch.zeros((), dtype=torch.float32, device=one.device),
                "exp_avg": torch.zeros_like(one),
                "exp_avg_sq": torch.zeros_like(one),
            }

    def ready(self, what: str) -> float:
        """Clip the gradients; returns their norm before. Raises where they are not finite."""
        for one in self._parameters.values():
            if one.grad is None:
                one.grad = torch.zeros_like(one)
        try:
            limit = self._settings.max_grad_norm
            return float(nn.utils.clip_grad_norm_(self._parameters.values(), limit, error_if_nonfinite=True))
        except RuntimeError as error:
            bad = [name for name, one in self._parameters.items() if not bool(one.grad.isfinite().all())]  # type: ignore[union-attr]
            raise TrainerError(f"{what}: gradient of {', '.join(bad[:3]) or 'all'} is not finite") from error

    def step(self, version: int) -> float:
        """Move the weights, at the rate of `version`, which is returned."""
        rate = self._settings.rate_at(version)
        for group in self._adam.param_groups:
            group["lr"] = rate
        self._adam.step()
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
        self._adam.zero_grad(set_to_none=True)

    def tensors(self) -> dict[str, Tensor]:
        """The whole state, live, by `<parameter>/<moment>` and `<parameter>/master`."""
        found = {
            f"{name}/{moment}": self._adam.state[one][moment]
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


def copied(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """By value."""
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


def overwrite(live: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> None:
    """Put `values` into `live`, which must have the same names."""
    with torch.no_grad():
        for name, tensor in live.items():
            tensor.copy_(values[name])
