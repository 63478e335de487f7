"""Starts a kernel while the one before it still runs.

A step is some two hundred kernels of a few microseconds, a good part of which is their start. On GPUs that can do it
(compute capability 9), the next kernel is started as soon as all programs of this one run, and waits inside for its
end. Every kernel of a step begins with `wait_for_previous_kernel`, before it reads or writes anything, so that a kernel
that has waited for its predecessor has waited for all before it.
"""

import os
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def wait_for_previous_kernel(EARLY: tl.constexpr):
    """Wait for the kernel before, then let the next one start."""
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()  # not before: kernels waiting for one that waits would only occupy its resources


@cache
def launch_options() -> dict[str, Any]:
    """Return the options for every launch of a kernel that calls `wait_for_previous_kernel`."""
    if os.environ.get("TRITON_INTERPRET") == "1" or torch.cuda.get_device_capability()[0] < 9:
        return {"EARLY": False}
    return {"EARLY": True, "launch_pdl": True}
