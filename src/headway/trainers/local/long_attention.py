"""Attention over packs of long sequences by cuDNN, which is faster than flash attention on Hopper and later GPUs.

Each member is one causal call over its prompt and itself: a prompt is computed once for every member, which is little
where members are long, and no mask exists. Lengths are padded a little at the end, where no query looks, so that few
different ones occur: cuDNN plans every length anew.

Legend: L tokens of the pack, S tokens of a sequence, H heads, D size of a head.
"""

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from headway.models.model_checks import print_once
from headway.trainers.local.tree_packing import PromptTree

LONG_SEQUENCE_TOKENS = 8192
"""Mean length from which the members of a pack are computed one by one."""


def is_long(trees: Sequence[PromptTree]) -> bool:
    """Return whether the members of `trees` are long on average."""
    return sum(tree.size for tree in trees) >= LONG_SEQUENCE_TOKENS * sum(len(tree.members) for tree in trees)


def is_faster(q_LHD: Tensor, k_LHD: Tensor) -> bool:
    """Return whether cuDNN is there, and right, for queries and keys of this kind."""
    return q_LHD.is_cuda and _check_cudnn(q_LHD.device, q_LHD.dtype, q_LHD.shape[1], k_LHD.shape[1], q_LHD.shape[2])


def attend_trees(
    q_LHD: Tensor, k_LHD: Tensor, v_LHD: Tensor, trees: Sequence[PromptTree], scale: float | None
) -> Tensor:
    """Return the results of all queries of a pack, [L, H, D]."""
    parts = []
    for tree in trees:
        own = tree.start + tree.prefix
        prompt = slice(tree.start, own)
        for number, length in enumerate(tree.members):
            if number:
                member = slice(own, own + length)
                q, k, v = (torch.cat([x[prompt], x[member]]) for x in (q_LHD, k_LHD, v_LHD))
                parts.append(attend_causally(q, k, v, scale)[tree.prefix :])
            else:
                both = slice(tree.start, own + length)
                parts.append(attend_causally(q_LHD[both], k_LHD[both], v_LHD[both], scale))
            own += length
    return torch.cat(parts) if len(parts) > 1 else parts[0]


def attend_causally(q_SHD: Tensor, k_SHD: Tensor, v_SHD: Tensor, scale: float | None) -> Tensor:
    """Return the result of one sequence, [S, H, D]."""
    length = q_SHD.shape[0]
    more = padded_length(length) - length
    heads_first = [(pad(x, (0, 0, 0, 0, 0, more)) if more else x).transpose(0, 1)[None] for x in (q_SHD, k_SHD, v_SHD)]
    found = torch.ops.aten._scaled_dot_product_cudnn_attention(*heads_first, None, True, 0.0, True, False, scale=scale)
    out: Tensor = found[0][0].transpose(0, 1)
    return out[:length]


def padded_length(length: int) -> int:
    """Return the next of some hundred lengths between two powers of two."""
    step = max(128, 1 << max(length.bit_length() - 8, 0))
    return -(-length // step) * step


@cache
def _check_cudnn(device: torch.device, dtype: torch.dtype, heads: int, key_heads: int, size: int) -> bool:
    """Return whether results and gradients of a short sequence are those of plain attention."""
    if torch.cuda.get_device_capability(device)[0] < 9:
        return False
    generator = torch.Generator(device).manual_seed(0)
    shapes = [(200, count, size) for count in (heads, key_heads, key_heads, heads)]
    *inputs, weight = (torch.randn(shape, device=device, generator=generator, dtype=dtype) for shape in shapes)
    found: list[list[Tensor]] = []
    try:
        for attend, wide in ((attend_causally, dtype), (_attend_plainly, torch.float32)):
            with torch.enable_grad():
                q, k, v = (x.to(wide, copy=True).requires_grad_() for x in inputs)
                out = attend(q, k, v, None)
                found.append([out.detach(), *torch.autograd.grad((out * weight).sum(), (q, k, v))])
        worst = max(float((a - b).norm() / b.norm()) for a, b in zip(*found, strict=True))
        problem = f"its results are {worst:.2g} off" if not worst < 3e-2 else None
    except RuntimeError as error:
        problem = str(error).partition("\n")[0]
    if problem is not None:
        print_once(f"long sequences are computed by flash attention, and not by cuDNN: {problem}")
    return problem is None


def _attend_plainly(q_SHD: Tensor, k_SHD: Tensor, v_SHD: Tensor, scale: float | None) -> Tensor:
    repeats = q_SHD.shape[1] // k_SHD.shape[1]
    q, k, v = (x.transpose(0, 1)[None] for x in (q_SHD, *(x.repeat_interleave(repeats, 1) for x in (k_SHD, v_SHD))))
    return scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)[0].transpose(0, 1)
