"""Adapters on a GPU: captured graphs compute base + adapter, and the base is the trainer's memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from headway.engines.native.native_core import make_block_core
from headway.models.frozen_base import FrozenBase

from .factory import full_logps, make_engine, make_model, request, run, together
from .test_served_adapters import adapt, serve_adapters, settings_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 2e-3), (torch.bfloat16, 0.15)])
@pytest.mark.parametrize(("family", "targets"), [("qwen2", ()), ("qwen3", ("q_proj", "v_proj", "down_proj"))])
def test_graphs_compute_base_and_adapter(
    family: str, targets: tuple[str, ...], dtype: torch.dtype, limit: float
) -> None:
    async def scenario() -> None:
        shape = {"hidden_size": 256, "intermediate_size": 512, "initializer_range": 0.05}
        model, parts = make_model(family, **shape), []
        base = FrozenBase("cuda:0", dtype)
        base.adopt(model)
        model.to("cuda")

        def make_core(*args: Any) -> Any:
            parts.append(make_block_core(*args))
            return parts[-1]

        options = {"device": "cuda", "dtype": str(dtype).removeprefix("torch."), "make_core": make_core, "slots": 8}
        engine = make_engine(model, adapters=settings_of(base, targets), **options)
        adapt(model, targets=targets)
        exact = make_model(family, **shape)
        adapt(exact, targets=targets)
        for version in range(3):
            for one in (model, exact):
                for name, tensor in one.named_parameters():
                    if "lora_B" in name:
                        tensor.data.mul_(-0.5)
            await serve_adapters(engine.receiver, model, version)
            asked = [request(f"{version}.{number}", range(3, 9 + number), count=24) for number in range(6)]
            for each, progress in zip(asked, await together(engine, asked), strict=True):
                assert progress.runs[0].version == version
                logps = full_logps(exact, each.prompt, progress.actions)
                wanted = logps.gather(1, torch.tensor(progress.actions)[:, None])[:, 0]
                difference = (wanted - torch.tensor(progress.logps)).abs()
                assert float(difference.mean()) < limit / 3 and float(difference.max()) < limit
        trained = {name.replace(".base_layer", ""): one for name, one in model.named_parameters()}
        served = parts[0][0].base._installed
        assert all(tensors[0].data_ptr() == trained[unit].data_ptr() for unit, tensors in served.items())
        await engine.close()

    run(scenario(), 240.0)
