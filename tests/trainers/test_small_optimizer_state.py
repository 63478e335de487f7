"""Optimizer state that needs less memory, against plain AdamW: in 8 bits, on the host, and without masters."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch
from torch import Tensor

from headway.algorithms.advantages import AdvantageSettings
from headway.trainers.local.eight_bit_moments import BLOCK, dequantize, make_codes, quantize, round_stochastically
from headway.trainers.local.local_optimizer import Optimizer, copy_tensors
from headway.trainers.local.local_trainer import LocalTrainer
from headway.trainers.local.settings import LocalSettings, OptimizerSettings
from headway.weights.weight_store import WeightStore

from .factory import batch, tiny

pytestmark = pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")


def descend(
    settings: OptimizerSettings, *, steps: int = 150, dtype: torch.dtype = torch.float32
) -> tuple[float, Tensor]:
    """Fit a matrix to a noisy linear map; returns the last loss and the weights."""
    dice = torch.Generator().manual_seed(1)
    wanted = torch.randn(96, 64, generator=dice)
    live = torch.nn.Parameter(torch.zeros(96, 64, dtype=dtype))
    optimizer = Optimizer({"live": live}, settings)
    for version in range(steps):
        x = torch.randn(32, 64, generator=dice) * torch.linspace(0.03, 1.0, 64)
        loss = (x @ (live.float() - wanted).T).square().mean()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.clip_gradients("a step")
        optimizer.step(version)
        optimizer.clear_gradients()
    return float(loss.detach()), live.detach().float()


def test_moments_in_eight_bits_descend_like_those_in_single_precision() -> None:
    plain = OptimizerSettings(learning_rate=0.02, max_grad_norm=1e9, betas=(0.9, 0.99))
    small = OptimizerSettings(learning_rate=0.02, max_grad_norm=1e9, betas=(0.9, 0.99), eight_bit=True)
    (wanted, weights), (found, others) = descend(plain), descend(small)
    start = float(descend(plain, steps=1)[0])
    assert wanted < start / 20
    assert found == pytest.approx(wanted, rel=0.2)
    assert float((weights - others).norm() / weights.norm()) < 0.03


def test_a_second_moment_in_eight_bits_follows_gradients_that_shrink() -> None:
    live = torch.nn.Parameter(torch.zeros(64, 64))
    settings = OptimizerSettings(learning_rate=1e-3, max_grad_norm=1e9, eight_bit=True)
    optimizer = Optimizer({"live": live}, settings)
    for version in range(400):
        live.grad = torch.full_like(live, 1.0 if version < 100 else 0.0)
        live.grad[0, ::BLOCK] = 1.0  # these keep the scale up
        optimizer.step(version)
    state = optimizer.state_tensors()
    root = dequantize(state["live/exp_avg_sq"].view(-1), state["live/exp_avg_sq_scale"], signed=False)
    wanted = ((1 - 0.999**100) * 0.999**300) ** 0.5
    assert float(root[1:].mean()) == pytest.approx(
        wanted, rel=0.05
    )  # rounded to the nearest code it would stay at 0.31


@pytest.mark.parametrize(
    ("dtype", "options"),
    [
        (torch.float32, OptimizerSettings()),
        (torch.bfloat16, OptimizerSettings(offload=True)),
        (torch.bfloat16, OptimizerSettings(eight_bit=True, stochastic_rounding=True)),
    ],
)
def test_a_backup_brings_weights_and_state_back_bit_for_bit(dtype: torch.dtype, options: OptimizerSettings) -> None:
    live = {name: torch.nn.Parameter(torch.randn(96, size, dtype=dtype)) for name, size in (("a", 64), ("b", 1))}
    optimizer = Optimizer(live, options)

    def step() -> None:
        sum(one.float().square().sum() for one in live.values()).backward()  # type: ignore[union-attr, no-untyped-call]
        optimizer.clip_gradients("a step")
        optimizer.step(0)
        optimizer.clear_gradients()

    step()
    before = copy_tensors(optimizer.all_tensors())
    optimizer.begin_backup().finish()
    step()
    assert not torch.equal(optimizer.all_tensors()["a"], before["a"])
    optimizer.restore_backup()
    assert all(torch.equal(tensor, before[name]) for name, tensor in optimizer.all_tensors().items())


@pytest.mark.parametrize("signed", [True, False])
def test_a_number_is_kept_on_average(signed: bool) -> None:
    dice = torch.Generator().manual_seed(0)
    values = torch.randn(1000, generator=dice) * torch.rand(1000, generator=dice) ** 3
    values = values if signed else values.abs()
    codes, scales = torch.empty(1000, dtype=torch.uint8), torch.empty(-(-1000 // BLOCK))
    total = torch.zeros(1000)
    for _ in range(600):
        quantize(values, codes, scales, signed=signed, generator=dice)
        total += dequantize(codes, scales, signed=signed)
    assert float((total / 600 - values).abs().max()) < 0.004
    assert len(make_codes(torch.device("cpu"), signed=signed)) == 256
    quantize(torch.zeros(1000), codes, scales, signed=signed, generator=dice)
    assert not dequantize(codes, scales, signed=signed).any()


def test_a_root_above_zero_does_not_become_zero() -> None:
    values, codes, scales = torch.full((BLOCK,), 1e-12), torch.empty(BLOCK, dtype=torch.uint8), torch.empty(1)
    values[0] = 1.0
    quantize(values, codes, scales, signed=False, generator=torch.Generator().manual_seed(0))
    assert bool((dequantize(codes, scales, signed=False) > 0).all())


def test_stochastic_rounding_has_no_bias() -> None:
    dice = torch.Generator().manual_seed(0)
    value = torch.full((200_000,), 1.0 + 0.3 * 2**-7)
    for sign in (1.0, -1.0):
        found = round_stochastically(sign * value, dice)
        assert found.dtype == torch.bfloat16 and set(found.float().tolist()) == {sign * 1.0, sign * (1.0 + 2**-7)}
        assert float(found.double().mean()) == pytest.approx(sign * float(value[0]), abs=3e-5)
    exact = torch.tensor([0.0, 1.0, -2.5, 3e38])
    assert torch.equal(round_stochastically(exact, dice)[:3].float(), exact[:3])


def test_steps_too_small_for_bf16_add_up_by_chance() -> None:
    live = torch.nn.Parameter(torch.ones(64, 64, dtype=torch.bfloat16))
    optimizer = Optimizer({"live": live}, OptimizerSettings(learning_rate=1e-5, stochastic_rounding=True))
    assert "live/master" not in optimizer.state_tensors()
    for version in range(600):
        live.sum().backward()  # type: ignore[no-untyped-call]
        optimizer.clip_gradients("a step")
        optimizer.step(version)
        optimizer.clear_gradients()
    assert float(live.detach().float().mean()) == pytest.approx(1 - 600e-5, abs=4e-4)


def test_bf16_without_masters_and_in_eight_bits_descends() -> None:
    plain = OptimizerSettings(learning_rate=0.02, max_grad_norm=1e9, betas=(0.9, 0.99))
    small = OptimizerSettings(
        learning_rate=0.02, max_grad_norm=1e9, betas=(0.9, 0.99), eight_bit=True, stochastic_rounding=True
    )
    assert descend(small, dtype=torch.bfloat16)[0] == pytest.approx(descend(plain)[0], rel=0.3)


def test_stochastic_rounding_says_where_nothing_is_rounded(capsys: pytest.CaptureFixture[str]) -> None:
    Optimizer({"live": torch.nn.Parameter(torch.ones(2))}, OptimizerSettings(stochastic_rounding=True))
    assert "stochastic_rounding has no effect" in "".join(capsys.readouterr())


def test_pieces_of_a_tensor_and_the_host_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def weights(**options: bool) -> Tensor:
        settings = OptimizerSettings(learning_rate=0.02, weight_decay=0.1, **options)  # type: ignore[arg-type]
        return descend(settings, steps=5)[1]

    plain = weights()
    monkeypatch.setattr("headway.trainers.local.local_optimizer._CHUNK_ELEMENTS", 4 * BLOCK)
    assert torch.equal(weights(offload=True), plain)
    assert torch.equal(weights(eight_bit=True, offload=True), weights(eight_bit=True))


def test_the_step_after_a_load_repeats_what_was_drawn_by_chance(tmp_path: Path) -> None:
    optimizer = OptimizerSettings(learning_rate=1e-3, eight_bit=True, stochastic_rounding=True, offload=True)
    settings = LocalSettings(advantages=AdvantageSettings(), precision="bf16", optimizer=optimizer)

    def trainer() -> LocalTrainer:
        return LocalTrainer(lambda: tiny(hidden=64), settings, WeightStore(wire_dtype=None))

    async def scenario() -> None:
        one, other = trainer(), trainer()
        await one.train(batch(0))
        await one.save(tmp_path)
        await other.load(tmp_path)
        assert dict(await one.train(batch(1))).keys() == dict(await other.train(batch(1))).keys()
        left, right = (made.learner.state.optimizer.all_tensors() for made in (one, other))
        assert {tensor.dtype for tensor in left.values()} == {torch.uint8, torch.float32, torch.bfloat16}
        assert left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)

    asyncio.run(scenario())
