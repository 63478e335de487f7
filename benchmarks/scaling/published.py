"""The figures to reproduce: arXiv 2510.11345 (ROLL Flash). Seconds unless said; some are read off plots.

Setting: 256 prompts × 16 responses, at most 32k tokens, mean 11k (Think) or 2k (Base), one update per batch,
asynchronous runs with α = 2 and train:infer 1:1 unless said.
"""

from __future__ import annotations

GPU_COUNT: dict[str, dict[int, tuple[float, float, float]]] = {
    "think": {16: (1.00, 1.08, 1.02), 32: (1.88, 1.74, 1.57), 64: (3.86, 3.06, 2.31), 128: (7.60, 4.10, 3.57)},
    "base": {16: (1.00, 0.77, 0.65), 32: (1.47, 0.88, 0.82), 64: (2.02, 1.02, 0.96), 128: (2.40, 1.15, 1.07)},
}
"""Throughput relative to asynchronous on 16 GPUs: asynchronous / synchronous with queue scheduling / naive."""

SPLIT: dict[tuple[int, int], float] = {(8, 32): 1703, (16, 24): 1298, (24, 16): 2188, (32, 8): 4326}
"""(train, infer) GPUs of 40 → seconds per step, Think."""
SPLIT_SYNC = 2133.0

BATCH: dict[int, tuple[float, float, float]] = {
    32: (643, 245, 235),
    64: (896, 380, 509),
    128: (1442, 710, 911),
    256: (2133, 1298, 1703),
    512: (3426, 2577, 3321),
}
"""Prompts per step → seconds per step: synchronous / 16T24I / 8T32I, 40 GPUs, Think."""

ALPHA_SPEEDUP: dict[int, float] = {1: 1.28, 2: 1.64, 3: 1.64}
"""α → throughput over synchronous training on the same 40 GPUs, 16T24I; more than 2 gives nothing."""
ALPHA_BY_LENGTH: dict[int, int] = {4096: 1, 8192: 1, 16384: 1, 32768: 2}
"""Longest response → the α from which more gives nothing."""
ALPHA_BY_BATCH: dict[int, int] = {32: 4, 128: 2}
"""Prompts per step → the same; 2 for every batch but 32."""

QUEUE: dict[int, tuple[float, float, float]] = {
    8: (125, 37, 60),
    16: (147, 53, 70),
    32: (170, 69, 84),
    64: (213, 90, 98),
    128: (296, 120, 142),
}
"""Prompts, 8 responses each → generation: batch / queue with 16 spare prompts / queue."""

REPLICATION: dict[tuple[int, int], tuple[float, float]] = {
    (16, 16): (77, 56),
    (32, 16): (116, 89),
    (64, 16): (149, 81),
    (16, 32): (162, 83),
    (16, 64): (186, 101),
}
"""Prompts × responses → generation: without / with prompt replication."""

ENVIRONMENT: dict[tuple[float, float], float] = {
    (10, 1): 1.16,
    (10, 3): 1.41,
    (10, 5): 2.08,
    (10, 7): 2.12,
    (10, 10): 2.46,
    (20, 5): 1.44,
    (50, 5): 1.15,
}
"""(mean, deviation) of a step's latency → speed-up of asynchronous environments, batch 512."""

REDUNDANT: tuple[float, float] = (243, 45)
"""32 × 8 and 36 × 12 environments, N(10, 5), batch 256."""

AGENTIC: dict[str, tuple[float, float, float, float, float]] = {
    "SWE": (10.22, 8.32, 7.66, 6.09, 5.65),
    "ALFWorld": (13.37, 8.44, 7.85, 5.87, 4.91),
    "ShopSimulator": (3.33, 2.54, 2.30, 2.12, 2.00),
}
"""Hours per 50 steps: synchronous / + asynchronous environments / + redundant / asynchronous / both."""

LOSING: tuple[float, float] = (221, 301)
"""NeMo-RL, one 30B setting: seconds per step, synchronous and asynchronous. Asynchrony loses."""
