"""AdamW over named parameters, with checked gradient clipping and a state that is plain tensors.

Guarantees: `clip_gradients` changes no weight and raises `TrainerError` if a gradient is NaN or infinite. State round
trips bit for bit through `state_tensors` and `overwrite_tensors`, and all that is drawn by chance follows from it.
State exists from the start, so the first step allocates little.

A step goes over the parameters in chunks. With `offload` moments and masters live in host memory: a chunk is copied to
the device while the one before is computed and the one before that is copied back; the numbers are the same, and the
seconds are counted. With `eight_bit` a chunk's moments are in float32 only while it is computed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from headway.errors import TrainerError
from headway.models.model_checks import print_once
from headway.trainers.local.eight_bit_moments import (
    BLOCK,
    SMALLEST_TENSOR,
    ZERO_CODE,
    dequantize,
    quantize,
    round_stochastically,
)
from headway.trainers.local.host_copies import HostCopies, State, StateBackup
from headway.trainers.local.settings import OptimizerSettings

_MOMENTS = ("exp_avg", "exp_avg_sq")
_SCALE = "_scale"
_ZERO_CODES = {"exp_avg": ZERO_CODE, "exp_avg_sq": 0}
"""Codes of zero: moments begin with it."""
_CHUNK_ELEMENTS = 64 * 1024**2
"""Parameters whose state is on the device, or in float32, at a time; a multiple of `BLOCK`."""
_HALF = (torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True)
class _Piece:
    """A range of the elements of one parameter."""

    name: str
    start: int
    end: int
    whole: bool

    def cut(self, tensor: Tensor, block: int = 1) -> Tensor:
        """Return this range of a tensor that has one number for each `block` elements."""
        if self.whole:
            return tensor
        return tensor.view(-1)[self.start // block : -(-self.end // block)]


class Optimizer:
    """AdamW with weight decay on matrices only.

    A parameter in half precision has a master copy in float32, which the optimizer changes: gradients are accumulated
    in float32, micro-batch after micro-batch, and the parameter is the master rounded. With `stochastic_rounding` there
    is no master: the parameter itself is changed, and rounded without a bias.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], settings: OptimizerSettings) -> None:
        self._live = dict(parameters)
        self._settings = settings
        half = any(one.dtype in _HALF for one in self._live.values())
        if settings.stochastic_rounding and not half:
            print_once("stochastic_rounding has no effect: weights are trained in fp32 here")
        self._parameters = {name: _make_gradient_holder(one) for name, one in self._live.items()}
        """What has the gradients: the parameter, or in half precision a float32 tensor without memory of its own."""
        self._state = {name: _make_state(one, settings) for name, one in self._live.items()}
        in_place = not (settings.offload or settings.eight_bit or (half and settings.stochastic_rounding))
        self._chunks = _cut_into_chunks(self._live, in_place=in_place)
        self.offload_s = 0.0
        """Seconds of the last step in which state was moved between host and device, the computation included."""
        self._report_offload: Callable[[bool], object] = lambda begins: None
        self._backup: StateBackup | None = None

    def report_offload_to(self, report: Callable[[bool], object]) -> None:
        """Call `report` with true when a step that moves state begins, and with false when it ends."""
        self._report_offload = report

    def clip_gradients(self, step_name: str) -> float:
        """Clip the gradients and return their norm before clipping. Raise `TrainerError` if they are not finite."""
        for one in self._parameters.values():
            if one.grad is None:
                one.grad = torch.zeros(one.shape, dtype=one.dtype, device=one.device)
        norm = self._gradient_norm()
        if not bool(norm.isfinite()):
            invalid = [name for name, one in self._parameters.items() if not bool(one.grad.isfinite().all())]  # type: ignore[union-attr]
            raise TrainerError(f"{step_name}: gradient of {', '.join(invalid[:3]) or 'all'} is not finite")
        nn.utils.clip_grads_with_norm_(self._parameters.values(), self._settings.max_grad_norm, norm)
        return float(norm)

    def _gradient_norm(self) -> Tensor:
        """Return the norm of all gradients together."""
        return nn.utils.get_total_norm([one.grad for one in self._parameters.values() if one.grad is not None])

    @torch.no_grad()
    def step(self, version: int) -> float:
        """Update the weights and return the learning rate, which is that of `version`."""
        rate, self.offload_s = self._settings.rate_at(version), 0.0
        steps = [state["step"] for state in self._state.values()]
        torch._foreach_add_(steps, 1)
        generator = self._make_generator(steps)
        if self._settings.offload:
            self._step_offloaded(rate, generator)
            return rate
        for chunk in self._chunks:
            self._update(chunk, [self._cut_state(piece) for piece in chunk], rate, generator)
        return rate

    def _make_generator(self, steps: Sequence[Tensor]) -> torch.Generator | None:
        """Return what draws the chances of a step, where there are any; a step that is repeated draws the same."""
        if not steps or not (self._settings.eight_bit or self._settings.stochastic_rounding):
            return None
        return torch.Generator(steps[0].device).manual_seed(int(steps[0]))

    def _step_offloaded(self, rate: float, generator: torch.Generator | None) -> None:
        """Update chunk after chunk, each with its state on the device for that long."""
        self._report_offload(True)
        begun_s = time.perf_counter()
        copies = HostCopies(next(iter(self._live.values())).device)
        ahead = copies.load([self._cut_state(piece) for piece in self._chunks[0]])
        for number, chunk in enumerate(self._chunks):
            here = copies.wait_for(ahead)
            if number + 1 < len(self._chunks):
                ahead = copies.load([self._cut_state(piece) for piece in self._chunks[number + 1]])
            self._update(chunk, here, rate, generator)
            copies.store(here, [self._cut_state(piece) for piece in chunk])
        copies.finish()
        self.offload_s = time.perf_counter() - begun_s
        self._report_offload(False)

    def _cut_state(self, piece: _Piece) -> State:
        """Return the range of all state of a parameter that belongs to `piece`."""
        return {
            name: piece.cut(tensor, BLOCK if name.endswith(_SCALE) else 1)
            for name, tensor in self._state[piece.name].items()
            if name != "step"
        }

    def _update(
        self, chunk: Sequence[_Piece], states: Sequence[State], rate: float, generator: torch.Generator | None
    ) -> None:
        """Do one step of the weights of `chunk`, and change `states` in place."""
        opened = [self._open(piece, state) for piece, state in zip(chunk, states, strict=True)]
        for decay, dtype in {(one.decay, one.weight.dtype) for one in opened}:
            alike = [one for one in opened if (one.decay, one.weight.dtype) == (decay, dtype)]
            torch._fused_adamw_(
                [one.weight for one in alike],
                [one.grad for one in alike],
                [one.mean for one in alike],
                [one.square for one in alike],
                [],
                [one.step for one in alike],
                lr=rate,
                beta1=self._settings.betas[0],
                beta2=self._settings.betas[1],
                weight_decay=decay,
                eps=self._settings.epsilon,
                amsgrad=False,
                maximize=False,
            )
        for one in opened:
            one.store_moments(generator)
        narrow = [one for one in opened if one.weight is not one.live]
        if narrow:
            values = [one.round_weight(generator) for one in narrow]
            torch._foreach_copy_([one.live for one in narrow], values)

    def _open(self, piece: _Piece, state: State) -> _OpenPiece:
        """Return everything that a step of `piece` reads and writes, in the type of the computation."""
        live, grad = self._live[piece.name].data, self._parameters[piece.name].grad
        assert grad is not None
        here = piece.cut(live)
        weight = state.get("master", here)
        weight = weight.float() if weight.dtype in _HALF else weight
        mean, square = state["exp_avg"], state["exp_avg_sq"]
        if mean.dtype == torch.uint8:
            mean = dequantize(mean, state["exp_avg_scale"], signed=True).view(mean.shape).to(weight.dtype)
            square = dequantize(square, state["exp_avg_sq_scale"], signed=False).square_().view(square.shape)
        return _OpenPiece(
            live=here,
            weight=weight,
            grad=piece.cut(grad.contiguous()),
            mean=mean,
            square=square.to(weight.dtype),
            step=self._state[piece.name]["step"],
            decay=self._settings.weight_decay if live.ndim >= 2 else 0.0,
            state=state,
        )

    def clear_gradients(self) -> None:
        """Drop all gradients."""
        for one in self._parameters.values():
            one.grad = None

    def begin_backup(self) -> StateBackup:
        """Begin to copy everything that a step changes, and return the copy; it is overwritten by the next one."""
        tensors = self._list_independent_tensors()
        self._backup = self._backup or StateBackup(tensors)
        self._backup.begin(tensors)
        return self._backup

    def restore_backup(self) -> None:
        """Undo every step since `begin_backup`."""
        if self._backup is None:
            raise TrainerError("there is no copy of the weights to go back to")
        self._backup.restore(self._list_independent_tensors())
        for name, one in self._live.items():
            if "master" in self._state[name]:
                one.data.copy_(self._state[name]["master"])

    def _list_independent_tensors(self) -> dict[str, Tensor]:
        """Return what a step changes, less the parameters that are rounded masters."""
        weights = {name: one.data for name, one in self._live.items() if "master" not in self._state[name]}
        return {**self.state_tensors(), **weights}

    def state_tensors(self) -> dict[str, Tensor]:
        """Return the whole state as live tensors named `<parameter>/<moment>` and `<parameter>/master`."""
        return {f"{name}/{key}": tensor for name, state in self._state.items() for key, tensor in state.items()}

    def all_tensors(self) -> dict[str, Tensor]:
        """Return state and parameters as live tensors: everything that a step changes."""
        return {**self.state_tensors(), **{name: one.data for name, one in self._live.items()}}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _OpenPiece:
    """What a step of one piece reads and writes."""

    live: Tensor
    weight: Tensor
    grad: Tensor
    mean: Tensor
    square: Tensor
    step: Tensor
    decay: float
    state: State

    def store_moments(self, generator: torch.Generator | None) -> None:
        """Write moments that are kept in 8 bits back; others were changed in place."""
        if self.state["exp_avg"].dtype == torch.uint8 and generator is not None:
            for name, values, signed in (("exp_avg", self.mean, True), ("exp_avg_sq", self.square.sqrt_(), False)):
                flat = values.float().view(-1)
                codes, scales = self.state[name].view(-1), self.state[name + _SCALE]
                quantize(flat, codes, scales, signed=signed, generator=generator)

    def round_weight(self, generator: torch.Generator | None) -> Tensor:
        """Return the weight as it is rounded into the parameter."""
        if "master" in self.state or generator is None or self.live.dtype != torch.bfloat16:
            return self.weight
        return round_stochastically(self.weight, generator)


def _cut_into_chunks(parameters: Mapping[str, nn.Parameter], *, in_place: bool) -> list[list[_Piece]]:
    """Group ranges of parameters that are computed together; all of them where nothing has to be made for a step."""
    if in_place:
        return [[_Piece(name, 0, one.numel(), whole=True) for name, one in parameters.items()]]
    found: list[list[_Piece]] = []
    space_left = 0
    for name, one in parameters.items():
        size = _CHUNK_ELEMENTS if one.is_contiguous() else one.numel()
        for start in range(0, one.numel(), max(size, 1)):
            piece = _Piece(name, start, min(start + size, one.numel()), whole=one.numel() <= size)
            if piece.end - start > space_left:
                found.append([])
                space_left = _CHUNK_ELEMENTS
            found[-1].append(piece)
            space_left -= piece.end - start
    return found


def _make_state(live: nn.Parameter, settings: OptimizerSettings) -> State:
    """Return step, moments and, in half precision, the master of one parameter."""
    wide = torch.float32 if live.dtype in _HALF else live.dtype
    small = settings.eight_bit and live.numel() >= SMALLEST_TENSOR and live.is_contiguous()
    where: dict[str, Any] = {"device": live.device}
    if settings.offload:
        where = {"device": "cpu", "pin_memory": live.is_cuda}
    state = {"step": torch.zeros((), dtype=torch.float32, device=live.device)}
    for name in _MOMENTS:
        state[name] = torch.zeros(live.shape, dtype=torch.uint8 if small else wide, **where)
        if small:
            state[name].fill_(_ZERO_CODES[name])
            state[name + _SCALE] = torch.zeros(-(-live.numel() // BLOCK), dtype=torch.float32, **where)
    if live.dtype in _HALF and not (settings.stochastic_rounding and live.dtype == torch.bfloat16):
        state["master"] = torch.empty(live.shape, dtype=wide, **where).copy_(live.detach())
    return state


def _make_gradient_holder(live: nn.Parameter) -> nn.Parameter:
    """Return what collects the gradients of a half-precision parameter in float32; else `live` itself."""
    if live.dtype not in _HALF:
        return live
    holder = nn.Parameter(torch.zeros(1, dtype=torch.float32, device=live.device).expand(live.shape))

    def collect(_: Tensor) -> None:
        grad = live.grad
        if grad is None:
            return
        if holder.grad is None:
            holder.grad = grad.float()
        else:
            holder.grad.add_(grad)
        live.grad = None

    live.register_post_accumulate_grad_hook(collect)  # type: ignore[no-untyped-call]
    return holder


def copy_tensors(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copy tensors by value."""
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


def overwrite_tensors(live: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> None:
    """Copy `values` into `live`, which must have the same names."""
    with torch.no_grad():
        for name, tensor in live.items():
            tensor.copy_(values[name])
