"""bf16 with masters in float32, and trees as sequences: what the GPU path rests on, checked without one."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from headway.algorithms.advantages import AdvantageSettings
from headway.trainers.local.local_optimizer import Optimizer, copy_tensors
from headway.trainers.local.local_trainer import LocalTrainer
from headway.trainers.local.optimizer_steps import apply_optimizer_steps
from headway.trainers.local.policy_update import UpdateReport
from headway.trainers.local.settings import LocalSettings, OptimizerSettings
from headway.trainers.local.training_thread import CommitGate
from headway.trainers.local.tree_attention import make_tree_mask
from headway.trainers.local.tree_packing import AttentionSpans, PromptTree
from headway.weights.weight_store import WeightStore

from .factory import batch, tiny

pytestmark = pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")
SLOW = OptimizerSettings(learning_rate=1e-5, weight_decay=0.0)


def trainer() -> LocalTrainer:
    chosen = LocalSettings(advantages=AdvantageSettings(), precision="bf16", optimizer=SLOW)
    return LocalTrainer(tiny, chosen, WeightStore(wire_dtype=None))


def test_steps_too_small_for_the_parameter_add_up_in_its_master() -> None:
    live = torch.nn.Parameter(torch.ones(8, 8, dtype=torch.bfloat16))
    optimizer = Optimizer({"live": live}, SLOW)
    for version in range(600):
        live.sum().backward()  # type: ignore[no-untyped-call]
        assert live.grad is None
        optimizer.clip_gradients("a step")
        optimizer.step(version)
        optimizer.clear_gradients()
    assert float(optimizer.state_tensors()["live/master"].mean()) == pytest.approx(1 - 600e-5, abs=1e-4)
    assert float(live.detach().float().mean()) == pytest.approx(1 - 600e-5, abs=4e-3) and float(live.detach()[0, 0]) < 1


def test_gradients_are_added_up_in_single_precision() -> None:
    live = torch.nn.Parameter(torch.zeros(4, dtype=torch.bfloat16))
    optimizer = Optimizer({"live": live}, OptimizerSettings(max_grad_norm=1e9))
    for _ in range(1000):
        (live * 1.0).sum().backward()  # type: ignore[no-untyped-call]
    assert optimizer.clip_gradients("a step") == pytest.approx(2000.0)  # 256 + 1 is 256 in bf16


def test_every_mini_batch_begins_without_gradients() -> None:
    live = torch.nn.Parameter(torch.ones(3))
    optimizer, before = Optimizer({"live": live}, SLOW), []

    def gradients(rows: Sequence[int]) -> None:
        before.append(live.grad)
        live.sum().backward()  # type: ignore[no-untyped-call]

    report = UpdateReport()
    apply_optimizer_steps([optimizer], [[1], [2], [3]], gradients, report, 0, CommitGate())
    assert before == [None, None, None] and report.steps == 3 and live.grad is None


def test_moments_on_the_host_make_the_same_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headway.trainers.local.local_optimizer._CHUNK_ELEMENTS", 4096)

    async def weights(offload: bool) -> dict[str, torch.Tensor]:
        made = LocalTrainer(
            tiny,
            LocalSettings(advantages=AdvantageSettings(), optimizer=replace(SLOW, offload=offload)),
            WeightStore(wire_dtype=None),
        )
        assert (len(made.learner.state.optimizer._chunks) > 3) == offload
        for step in range(3):
            await made.train(batch(step))
        return copy_tensors(made.learner.state.optimizer.all_tensors())

    async def scenario() -> None:
        plain, offloaded = await weights(False), await weights(True)
        assert plain.keys() == offloaded.keys()
        assert all(torch.equal(plain[name], offloaded[name]) for name in plain)

    asyncio.run(scenario())


def test_a_checkpoint_brings_the_masters_back(tmp_path: Path) -> None:
    async def scenario() -> None:
        one, other = trainer(), trainer()
        for step in range(2):
            await one.train(batch(step))
        await one.save(tmp_path)
        await other.load(tmp_path)
        assert dict(await one.train(batch(2))) == dict(await other.train(batch(2)))
        for made in (one, other):
            assert {tensor.dtype for tensor in made.learner.policy.weights().values()} == {torch.bfloat16}
        left, right = (made.learner.state.optimizer.all_tensors() for made in (one, other))
        assert left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)

    asyncio.run(scenario())


@pytest.mark.parametrize(
    "trees",
    [
        (PromptTree(start=0, prefix=3, members=(2, 4)), PromptTree(start=9, prefix=5, members=(3,))),
        (PromptTree(start=0, prefix=0, members=(2, 3)), PromptTree(start=5, prefix=2, members=(1, 1, 1))),
        (PromptTree(start=0, prefix=2, members=(4,)), PromptTree(start=6, prefix=1, members=(2,))),
    ],
)
def test_sequences_see_what_the_tree_lets_them_see(trees: tuple[PromptTree, ...]) -> None:
    size = sum(tree.size for tree in trees)
    spans = AttentionSpans.of_trees(trees, torch.device("cpu"))
    keys = torch.arange(size) if spans.key_K is None else spans.key_K
    seen = torch.zeros(size, size, dtype=torch.bool)
    queries, ends = spans.query_ends.tolist(), spans.key_ends.tolist()
    for index in range(len(queries) - 1):
        own = keys[ends[index] : ends[index + 1]]
        count = queries[index + 1] - queries[index]
        assert count <= spans.longest_query and len(own) <= spans.longest_key
        for place in range(count):  # causal from the end
            seen[queries[index] + place, own[: len(own) - count + place + 1]] = True
    wanted = torch.zeros(size, size, dtype=torch.bool)
    for tree in trees:
        here = slice(tree.start, tree.start + tree.size)
        wanted[here, here] = make_tree_mask(tree)
    assert torch.equal(seen, wanted)
