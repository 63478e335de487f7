"""AdamW over named parameters, with checked gradient clipping and a state that is plain tensors.

Guarantees: `clip_gradients` changes no weight and raises `TrainerError` if a gradient is NaN or infinite. State round
trips bit for bit through `state_tensors` and `overwrite_tensors`. State exists from the start, so the first step
allocates nothing new. With `offload` the moments live in host memory and are moved to the device a few parameters at a
time; the numbers are the same, and the seconds are counted.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext

import torch
from torch import Tensor, nn

from headway.errors import TrainerError
from headway.trainers.local.settings import OptimizerSettings

_STATE_NAMES = ("step", "exp_avg", "exp_avg_sq")
_MOMENTS = _STATE_NAMES[1:]
_OFFLOAD_CHUNK_BYTES = 512 * 1024**2
"""Size of the moments that are on the device at a time, where they live on the host."""


class Optimizer:
    """AdamW with weight decay on matrices only.

    A parameter in half precision has a master copy in float32, which the optimizer changes: gradients are accumulated
    there, micro-batch after micro-batch, and the parameter is the master rounded.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], settings: OptimizerSettings) -> None:
        self._live = dict(parameters)
        self._settings = settings
        self._parameters = {name: _make_master(one) for name, one in self._live.items()}
        chunks = (
            _group_for_offload(self._parameters.values()) if settings.offload else [list(self._parameters.values())]
        )
        self._adams = [_make_adam(chunk, settings) for chunk in chunks]
        self._state = {one: adam.state[one] for adam, chunk in zip(self._adams, chunks, strict=True) for one in chunk}
        self.offload_s = 0.0
        """Seconds for which the last step moved moments between host and device."""
        self.on_offload: Callable[[bool], None] = lambda begins: None
        """Called when a step that moves moments begins, and when it ends."""

    def clip_gradients(self, step_name: str) -> float:
        """Clip the gradients and return their norm before clipping. Raise `TrainerError` if they are not finite."""
        for one in self._parameters.values():
            if one.grad is None:
                one.grad = torch.zeros_like(one)
        norm = self._gradient_norm()
        if not bool(norm.isfinite()):
            invalid = [name for name, one in self._parameters.items() if not bool(one.grad.isfinite().all())]  # type: ignore[union-attr]
            raise TrainerError(f"{step_name}: gradient of {', '.join(invalid[:3]) or 'all'} is not finite")
        nn.utils.clip_grads_with_norm_(self._parameters.values(), self._settings.max_grad_norm, norm)
        return float(norm)

    def _gradient_norm(self) -> Tensor:
        """Return the norm of all gradients together."""
        return nn.utils.get_total_norm([one.grad for one in self._parameters.values() if one.grad is not None])

    def step(self, version: int) -> float:
        """Update the weights and return the learning rate, which is that of `version`."""
        rate, self.offload_s = self._settings.rate_at(version), 0.0
        if self._settings.offload:
            self.on_offload(True)
        for adam in self._adams:
            for group in adam.param_groups:
                group["lr"] = rate
            with self._moments_on_device(adam) if self._settings.offload else nullcontext():
                adam.step()
        self._copy_masters()
        if self._settings.offload:
            self.on_offload(False)
        return rate

    @contextmanager
    def _moments_on_device(self, adam: torch.optim.AdamW) -> Iterator[None]:
        """Keep the moments on the device inside the context, and copy them back to the host afterwards."""
        on_host = {one: {moment: state[moment] for moment in _MOMENTS} for one, state in adam.state.items()}
        with self._measured(on_host):
            for one, moments in on_host.items():
                there = {name: moment.to(one.device, non_blocking=True) for name, moment in moments.items()}
                adam.state[one] |= there
        try:
            yield
        finally:
            with self._measured(on_host):
                for one, moments in on_host.items():
                    for name, moment in moments.items():
                        moment.copy_(adam.state[one][name], non_blocking=True)
                    adam.state[one] |= moments

    @contextmanager
    def _measured(self, parameters: Iterable[Tensor]) -> Iterator[None]:
        """Add the seconds of copies to `offload_s`; they are complete afterwards."""
        on_gpu = any(one.is_cuda for one in parameters)
        if on_gpu:
            torch.cuda.current_stream().synchronize()
        begun_s = time.perf_counter()
        yield
        if on_gpu:
            torch.cuda.current_stream().synchronize()
        self.offload_s += time.perf_counter() - begun_s

    @torch.no_grad()
    def _copy_masters(self) -> None:
        """Copy the master weights into the parameters."""
        pairs = [(live, self._parameters[name]) for name, live in self._live.items()]
        narrow = [(live.data, master.data) for live, master in pairs if live is not master]
        if narrow:
            torch._foreach_copy_([live for live, _ in narrow], [master for _, master in narrow])

    def clear_gradients(self) -> None:
        """Drop all gradients."""
        for adam in self._adams:
            adam.zero_grad(set_to_none=True)

    def state_tensors(self) -> dict[str, Tensor]:
        """Return the whole state as live tensors named `<parameter>/<moment>` and `<parameter>/master`."""
        found = {
            f"{name}/{moment}": self._state[one][moment]
            for name, one in self._parameters.items()
            for moment in _STATE_NAMES
        }
        for name, one in self._parameters.items():
            if one is not self._live[name]:
                found[f"{name}/master"] = one.data
        return found

    def all_tensors(self) -> dict[str, Tensor]:
        """Return state and parameters as live tensors: everything that a step changes."""
        return {**self.state_tensors(), **{name: one.data for name, one in self._live.items()}}


def _group_for_offload(parameters: Iterable[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Group parameters whose moments are on the device together."""
    found: list[list[nn.Parameter]] = []
    space_left = 0
    for one in parameters:
        size = len(_MOMENTS) * one.numel() * one.element_size()
        if size > space_left:
            found.append([])
            space_left = _OFFLOAD_CHUNK_BYTES
        found[-1].append(one)
        space_left -= size
    return found


def _make_adam(parameters: Sequence[nn.Parameter], settings: OptimizerSettings) -> torch.optim.AdamW:
    """Make the optimizer of `parameters` with all of its state."""
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
        adam.state[one] |= {moment: _zeros_like(one, host=settings.offload) for moment in _MOMENTS}
    return adam


def _zeros_like(one: nn.Parameter, *, host: bool) -> Tensor:
    if not host:
        return torch.zeros_like(one)
    return torch.zeros(one.shape, dtype=one.dtype, pin_memory=one.is_cuda)


def _make_master(live: nn.Parameter) -> nn.Parameter:
    """Return the float32 master of a half-precision parameter, which collects its gradients; else `live` itself."""
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
    """Copy tensors by value."""
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


def overwrite_tensors(live: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> None:
    """Copy `values` into `live`, which must have the same names."""
    with torch.no_grad():
        for name, tensor in live.items():
            tensor.copy_(values[name])
