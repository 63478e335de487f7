"""Rollout in 8 bits: what is drawn, and its log-probability, are those of a model with quantized layers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from headway.engines.native.quantized_products import check_quantized_device, multiply_quantized, quantize_rows
from headway.engines.native.served_parameters import DeviceParameters
from headway.errors import ConfigError

from .factory import make_engine, make_model, request, run, serve, together, worst
from .families import make_family
from .test_cuda_blocks import DEVICES, in_blocks, prompts


def round_rows(x: Tensor) -> Tensor:
    """To the numbers of fp8, independent of the code that is tested: 3 bits of mantissa, exponents from −6."""
    scale = x.abs().amax(-1, keepdim=True) / 448
    scaled = x / scale
    step = torch.exp2(torch.floor(torch.log2(scaled.abs().clamp_min(2.0**-6))) - 3)
    return torch.round(scaled / step) * step * scale


def quantize_model(model: Any) -> Any:
    """The same model, whose linear layers but for the head round weights and inputs."""
    for name, layer in model.named_modules():
        if isinstance(layer, nn.Linear) and "lm_head" not in name:
            layer.weight.data = round_rows(layer.weight.data)
            layer.register_forward_pre_hook(lambda module, inputs: (round_rows(inputs[0]),))
    return model


def test_rows_round_to_the_nearest_number_of_8_bits() -> None:
    torch.manual_seed(0)
    x = torch.randn(50, 64) * torch.logspace(-6, 3, 50)[:, None]
    assert torch.allclose(quantize_rows(x).restore(), round_rows(x), rtol=1e-5, atol=0.0)
    assert not quantize_rows(torch.zeros(2, 16)).restore().any()
    weight, bias = torch.randn(32, 64), torch.randn(32)
    product = multiply_quantized(x, quantize_rows(weight), bias)
    assert torch.allclose(product, round_rows(x) @ round_rows(weight).t() + bias, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_log_probabilities_are_those_of_the_quantized_model(family: str, plain: bool, device: str) -> None:
    async def scenario() -> None:
        first, second = make_model(family, seed=1), make_model(family)
        served = in_blocks(second, plain=plain, device=device, dtype="fp8")
        for version, model in enumerate((first, second)):  # quantized again with every version
            await serve(served, model, version)
            asked = [request(f"{version}/{n}", prompt, count=12) for n, prompt in enumerate(prompts(6))]
            found = await together(served, asked)
            exact = quantize_model(make_model(family, seed=1 - version))
            near = [worst(exact, each, progress) for each, progress in zip(asked, found, strict=True)]
            far = [worst(model, each, progress) for each, progress in zip(asked, found, strict=True)]
            # A number between two others may fall to either, so that not all agree. With bfloat16 around most fall
            # elsewhere, and two roundings to 8 bits differ as much as one does from none.
            limit = 1e-3 if device == "cpu" else 1.6 * sum(far) / len(far)
            assert sorted(near)[3] < limit and max(near) < 1.5
            assert min(far) > 2e-3
        await served.close()

    run(scenario(), timeout_s=200.0)


@pytest.mark.parametrize("device", DEVICES)
def test_keys_and_values_of_8_bits_take_half_the_memory_and_change_little(device: str) -> None:
    async def scenario() -> None:
        model, sizes = make_model("qwen3"), list[int]()
        for kv_dtype in ("auto", "fp8"):
            served = in_blocks(model, device=device, kv_dtype=kv_dtype, dtype="fp8" if device == "cuda" else "float32")
            await serve(served, model)
            asked = [request(str(n), prompt) for n, prompt in enumerate(prompts(6))]
            found = await together(served, asked)
            differences = [worst(model, each, progress) for each, progress in zip(asked, found, strict=True)]
            assert max(differences) < (1e-4 if kv_dtype == "auto" and device == "cpu" else 1.0)
            assert kv_dtype == "auto" or max(differences) > 1e-3
            await served._get_thread().call(lambda core: sizes.append(core._runner.kv.layers[0][0].nbytes) or [])
            await served.close()
        assert sizes[1] * (2 if device == "cuda" else 4) == sizes[0]

    run(scenario(), timeout_s=200.0)


def test_heads_routers_and_experts_stay_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    model = make_family("qwen2_moe")
    parameters = DeviceParameters(model, torch.float32, torch.device("cpu"), quantized=True)
    quantized = {unit for unit in parameters._places if parameters._is_quantized(unit)}
    assert quantized and not any(part in unit for unit in quantized for part in ("lm_head", ".gate.", "experts."))
    assert "of the weights are served in 8 bits, the others in bfloat16" in capsys.readouterr().err
    whole = DeviceParameters(make_family("qwen2_moe"), torch.float32, torch.device("cpu"))
    assert parameters.bytes < whole.bytes


def test_what_cannot_multiply_8_bits_refuses_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        with pytest.raises(Exception, match="CPUs do not multiply it") as refused:
            await serve(make_engine(make_model(), dtype="fp8"), make_model())
        assert "\n" not in str(refused.value)

    run(scenario())
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100")
    with pytest.raises(ConfigError, match=r"NVIDIA A100 \(compute capability 8.0\) does not multiply fp8"):
        check_quantized_device(torch.device("cuda"))
