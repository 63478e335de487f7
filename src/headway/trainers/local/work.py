"""How much a step computes, and what the chip could: the two numbers behind MFU.

Counted is what the mathematics needs: six operations for every weight and packed token. Whatever is recomputed, and
attention, which is little beside it at the usual lengths, does not count. An embedding that is only looked up in does
not compute.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

PEAKS: Mapping[str, float] = {
    "B200": 2250.0,
    "H200": 989.0,
    "H100": 989.0,
    "A100": 312.0,
    "L40S": 362.0,
    "RTX 4090": 165.0,
    "RTX 3090": 71.0,
}
"""Dense TFLOP/s in bf16, by what is in the name of the chip."""


def weights_at_work(model: Any) -> int:
    """Weights that every token is multiplied with."""
    found: int = sum(one.numel() for one in model.parameters())
    inside, outside = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    return found if inside is outside else found - int(inside.numel())


def peak_tflops(device: str) -> float | None:
    """Of the chip; None where it is not known."""
    if torch.device(device).type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for part, peak in PEAKS.items() if part in name), None)
