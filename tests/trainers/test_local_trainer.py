"""The local trainer meets the contract; steps are all or nothing; checkpoints go on bit for bit."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path
from typing import Any

import pytest
import torch

from headway.algorithms.advantages import AdvantageSettings
from headway.algorithms.kl import KlController
from headway.algorithms.losses import LossSettings
from headway.algorithms.objective import PolicyObjective
from headway.errors import ConfigError, ScoringError, TrainerCrashed, TrainerError
from headway.trainers.base import Trainer, TrainerScorer
from headway.trainers.local.local_trainer import LocalTrainer
from headway.trainers.local.settings import LocalSettings, LoraSettings, OptimizerSettings
from headway.types import Batch
from headway.weights.weight_receiver import DoubleBufferedReceiver
from headway.weights.weight_store import WeightStore

from ..contracts.trainer_contract import TrainerContract
from .factory import batch, tiny

GRPO = AdvantageSettings(adv_estimator="grpo")
FAST = OptimizerSettings(learning_rate=1e-2)


def settings(**options: Any) -> LocalSettings:
    return LocalSettings(**{"advantages": GRPO, "optimizer": FAST, "micro_batch_tokens": 64, **options})


def trainer(options: LocalSettings | None = None, **model: Any) -> LocalTrainer:
    store = WeightStore(bucket_mb=0.01, wire_dtype=None)
    return LocalTrainer(lambda: tiny(**model), options or settings(), store)


def digest(made: LocalTrainer) -> str:
    """Of weights and moments."""
    state = {**made.learner.policy.weights(), **made.learner.state.optimizer.state_tensors()}
    sums = blake2b()
    for name, tensor in sorted(state.items()):
        sums.update(name.encode() + tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return sums.hexdigest()


class TestLocalTrainer(TrainerContract):
    def run(self, scenario: Coroutine[Any, Any, None]) -> None:
        asyncio.run(scenario)

    def make(self) -> Trainer:
        return trainer()

    def batch(self, trained: int) -> Batch:
        return batch(trained)

    async def crash(self, trainer: Trainer) -> None:
        assert isinstance(trainer, LocalTrainer)
        trainer.abandon("a test broke it")

    def contents(self, trainer: Trainer) -> object:
        assert isinstance(trainer, LocalTrainer)
        return digest(trainer)


VARIANTS = {
    "lora": settings(lora=LoraSettings(rank=4, alpha=8)),
    "critic": settings(advantages=AdvantageSettings(adv_estimator="gae"), critic=FAST),
    "epochs": settings(epochs=2, mini_batch_samples=5),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_the_step_after_a_load_is_the_step_that_would_have_been_bit_for_bit(name: str, tmp_path: Path) -> None:
    async def scenario() -> None:
        one, other = trainer(VARIANTS[name]), trainer(VARIANTS[name])
        for step in range(2):
            await one.train(batch(step))
        await one.save(tmp_path)
        await other.load(tmp_path)
        assert other.version == 2 and digest(other) == digest(one)
        assert dict(await one.train(batch(2))) == dict(await other.train(batch(2)))
        assert digest(other) == digest(one)
        if one.learner.critic is not None and other.learner.critic is not None:
            pairs = zip(one.learner.critic.parameters(), other.learner.critic.parameters(), strict=True)
            assert all(torch.equal(a, b) for a, b in pairs)

    asyncio.run(scenario())


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("lora", [None, LoraSettings(rank=4)])
def test_transformers_loads_a_checkpoint_directly(tied: bool, lora: LoraSettings | None, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    async def scenario() -> None:
        made = trainer(settings(lora=lora), tied=tied)
        await made.train(batch(0))
        await made.save(tmp_path)
        assert ("lm_head.weight" in made.learner.policy.weights()) is not tied
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
        ids = torch.arange(12)[None] % 23
        with torch.no_grad():
            wanted, got = made.learner.policy.causal(ids).logits, loaded(ids).logits
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)

    asyncio.run(scenario())
    assert not [path for path in tmp_path.iterdir() if path.suffix not in (".safetensors", ".json")]


def poison(made: LocalTrainer) -> None:
    """The next gradient is NaN."""
    head = made.learner.policy.causal.model.norm.weight
    head.register_hook(lambda grad: grad * float("nan"))


def test_a_model_with_contradictory_generation_settings_can_be_saved(tmp_path: Path) -> None:
    from transformers import GenerationConfig

    def model() -> Any:
        made = tiny()
        made.generation_config = GenerationConfig(eos_token_id=[2, 5], do_sample=False, temperature=0.6)
        return made

    async def scenario() -> None:
        made = LocalTrainer(model, settings(), WeightStore(bucket_mb=0.01, wire_dtype=None))
        await made.save(tmp_path)
        assert GenerationConfig.from_pretrained(tmp_path).eos_token_id == [2, 5]
        await made.load(tmp_path)
        await made.close()

    asyncio.run(scenario())


@pytest.mark.parametrize("options", [settings(), settings(epochs=3)])
def test_a_step_with_a_gradient_that_is_not_finite_is_refused(options: LocalSettings) -> None:
    async def scenario() -> None:
        made = trainer(options)
        await made.train(batch(0))
        before = digest(made)
        poison(made)
        with pytest.raises(TrainerError, match="not finite"):
            await made.train(batch(1))
        assert made.version == 1 and digest(made) == before
        await made.source.gather(1)

    asyncio.run(scenario())


def test_a_refusal_in_the_second_of_several_steps_undoes_the_first() -> None:
    async def scenario() -> None:
        made = trainer(settings(epochs=3))
        before, calls = digest(made), [0]
        optimizer = made.learner.state.optimizer
        ready = optimizer.clip_gradients

        def third(what: str) -> float:
            calls[0] += 1
            if calls[0] == 3:
                poison(made)
                raise TrainerError("not finite")
            return ready(what)

        optimizer.clip_gradients = third  # type: ignore[method-assign]
        with pytest.raises(TrainerError):
            await made.train(batch(0))
        assert made.version == 0 and digest(made) == before

    asyncio.run(scenario())


def runs_out(made: LocalTrainer, most: int) -> list[int]:
    """Memory for `most` tokens at a time; returns what was asked for."""
    asked: list[int] = []

    def enter(_: Any, args: Any, kwargs: Any) -> None:
        asked.append(kwargs["input_ids"].numel())
        if asked[-1] > most:
            raise torch.OutOfMemoryError("no room for it\nand a long table")

    made.learner.policy.backbone.register_forward_pre_hook(enter, with_kwargs=True)
    return asked


@pytest.mark.parametrize("epochs", [1, 2])
def test_a_step_that_runs_out_of_memory_is_made_in_smaller_parts(epochs: int) -> None:
    async def scenario() -> None:
        options = settings(micro_batch_tokens=400)
        if epochs > 1:
            options = replace(options, epochs=epochs, mini_batch_samples=7)
        made, other = trainer(options), trainer(replace(options, micro_batch_tokens=60))
        asked = runs_out(made, 60)
        metrics, wanted = await made.train(batch(0, longest=20)), await other.train(batch(0, longest=20))
        assert asked[0] > 60 and metrics["micro_batch_tokens"] <= 60 and made.version == 1
        for name in ("loss", "grad_norm", "entropy", "tokens", "optimizer_steps"):
            assert metrics[name] == pytest.approx(wanted[name], rel=1e-4)
        asked.clear()
        await made.train(batch(1, longest=20))
        assert max(asked) <= 60  # it remembers

    asyncio.run(scenario())


def test_a_sample_for_which_there_is_no_memory_is_named_and_nothing_is_changed() -> None:
    async def scenario() -> None:
        made = trainer()
        before = digest(made)
        runs_out(made, 1)
        with pytest.raises(
            TrainerError, match=r"a single sample of \d+ tokens does not fit into memory: no room for it$"
        ):
            await made.train(batch(0))
        assert made.version == 0 and digest(made) == before

    asyncio.run(scenario())


def test_a_sample_that_is_too_long_for_kept_activations_has_them_recomputed(capfd: pytest.CaptureFixture[str]) -> None:
    async def scenario() -> None:
        options = settings(micro_batch_tokens=400, gradient_checkpointing=False)
        made, other = trainer(options), trainer(options)
        policy = made.learner.policy

        def enter(*_: Any) -> None:
            if not policy.activations.recompute:
                raise torch.OutOfMemoryError("no room for it")

        policy.backbone.register_forward_pre_hook(enter)
        metrics, wanted = await made.train(batch(0, longest=20)), await other.train(batch(0, longest=20))
        assert made.version == 1 and metrics["grad_norm"] == pytest.approx(wanted["grad_norm"], rel=1e-5)
        assert "activations are recomputed from now on" in capfd.readouterr().err

    asyncio.run(scenario())


@pytest.mark.parametrize("kind", [RuntimeError, torch.OutOfMemoryError])
def test_an_error_while_weights_move_loses_the_trainer(kind: type[Exception]) -> None:
    async def scenario() -> None:
        made = trainer()

        def explode(version: int) -> float:
            raise kind("out of memory")

        made.learner.state.optimizer.step = explode  # type: ignore[method-assign]
        with pytest.raises(TrainerCrashed, match="out of memory"):
            await made.train(batch(0))
        with pytest.raises(TrainerCrashed):
            await made.train(batch(0))
        await made.restart()
        await made.train(batch(0))
        assert made.version == 1

    asyncio.run(scenario())


def test_a_cancelled_step_changes_nothing_or_is_completed() -> None:
    async def scenario() -> None:
        made = trainer()
        before = digest(made)
        task = asyncio.create_task(made.train(batch(0, groups=20)))
        await asyncio.sleep(0.02)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await made.score("policy", batch(0).groups[0])  # the thread is free again
        assert (made.version == 0) == (digest(made) == before)

    asyncio.run(scenario())


def test_nonsense_in_a_sample_is_refused_by_name() -> None:
    async def scenario() -> None:
        made = trainer()
        before = digest(made)
        good = batch(0)
        first = good.groups[0].samples[0]
        turn = first.episode.turns[0]
        generation = turn.generation

        def wrong(**change: Any) -> Batch:
            turns = (replace(turn, generation=replace(generation, **change)),)
            bad = replace(first, episode=replace(first.episode, turns=turns))
            group = replace(good.groups[0], samples=(bad, *good.groups[0].samples[1:]))
            return replace(good, groups=(group, *good.groups[1:]))

        for case in (
            wrong(actions=(999,) * first.actions),
            wrong(logps=(float("nan"),) * first.actions),
            wrong(logps=(-1.0,)),
            wrong(actions=()),
            wrong(runs=()),
            replace(good, groups=(replace(good.groups[0], samples=(replace(first, score=None),)),)),
        ):
            with pytest.raises(TrainerError, match=r"0\.0\.0|score"):
                await made.train(case)
        assert made.version == 0 and digest(made) == before

    asyncio.run(scenario())


def test_lora_trains_adapters_only_and_sends_merged_weights() -> None:
    async def scenario() -> None:
        plain = {name: one.clone() for name, one in tiny().state_dict().items() if name != "lm_head.weight"}
        made = trainer(settings(lora=LoraSettings(rank=4, alpha=8), reference=True))
        assert all(".lora_" in name for name in made.learner.policy.trainable())
        served: dict[str, torch.Tensor] = {}

        async def switch(version: int, tensors: Any) -> None:
            served.update({name: one.clone() for name, one in tensors.items()})

        async def pushed() -> None:
            receiver = DoubleBufferedReceiver(switch)
            manifest, buckets = await made.source.gather(made.version)
            await receiver.begin(manifest)
            async for bucket in buckets:
                await receiver.load(bucket)
            await receiver.flip()

        await pushed()
        assert served.keys() == plain.keys()
        assert all(torch.equal(served[name], plain[name]) for name in plain), "fresh adapters change nothing"
        group = batch(9).groups[0]
        at_start = await TrainerScorer(made, "reference").score(group)
        assert at_start == list(await TrainerScorer(made, "policy").score(group))
        for step in range(2):
            await made.train(batch(step))
        await pushed()
        changed = {name for name in plain if not torch.equal(served[name], plain[name])}
        assert changed and all("proj" in name for name in changed)
        assert at_start == await TrainerScorer(made, "reference").score(group), "adapters off is the start"
        assert at_start != list(await TrainerScorer(made, "policy").score(group))

    asyncio.run(scenario())


def test_the_reference_stays_where_it_was_and_pulls() -> None:
    async def scenario() -> None:
        objective = PolicyObjective(pg_variant="ppo", settings=LossSettings(), kl_coef=0.1)
        made = trainer(settings(objective=objective, reference=True))
        group = batch(9).groups[0]
        before = await TrainerScorer(made, "reference").score(group)
        assert before == list(await TrainerScorer(made, "policy").score(group))
        first, second = dict(await made.train(batch(0))), dict(await made.train(batch(1)))
        assert first["kl_loss"] == 0.0 and second["kl_loss"] > 0.0
        assert (
            before
            == await TrainerScorer(made, "reference").score(group)
            != list(await TrainerScorer(made, "policy").score(group))
        )

    asyncio.run(scenario())


def test_a_token_penalty_steers_its_coefficient() -> None:
    async def scenario() -> None:
        estimator = AdvantageSettings(adv_estimator="grpo", kl_penalty="k1")
        store = WeightStore()
        kl = lambda: KlController(0.1, target=1e-3, horizon=10)  # noqa: E731
        made = LocalTrainer(tiny, settings(advantages=estimator, reference=True), store, make_kl=kl)
        metrics = [dict(await made.train(batch(step))) for step in range(2)]
        assert metrics[-1]["kl_coef"] != 0.1

    asyncio.run(scenario())


def test_the_critic_learns_what_to_expect() -> None:
    async def scenario() -> None:
        advantages = AdvantageSettings(adv_estimator="gae", norm_mean_type="none", norm_std_type="none")
        options = settings(advantages=advantages, critic=OptimizerSettings(learning_rate=1e-2))
        made = trainer(options)
        group = batch(0).groups[0]
        rows = await TrainerScorer(made, "value").score(group)
        assert [len(row) for row in rows] == [one.actions for one in group.samples]
        assert all(value == 0.0 for row in rows for value in row)
        losses = [dict(await made.train(replace(batch(0), trained=step)))["value_loss"] for step in range(12)]
        assert losses[-1] < losses[0] / 2

    asyncio.run(scenario())


def test_the_critic_learns_alone_while_it_warms_up() -> None:
    async def scenario() -> None:
        advantages = AdvantageSettings(adv_estimator="gae", norm_mean_type="none", norm_std_type="none")
        slow = replace(FAST, schedule="linear", max_steps=4, first_step=2)
        made = trainer(settings(advantages=advantages, critic=FAST, optimizer=slow, critic_warmup=2))
        assert made.learner.critic is not None
        start, values = digest(made), [one.clone() for one in made.learner.critic.parameters()]
        metrics = [dict(await made.train(batch(step))) for step in range(2)]
        assert made.version == 2 and digest(made) == start and all(one["value_loss"] > 0 for one in metrics)
        assert any(not torch.equal(*pair) for pair in zip(values, made.learner.critic.parameters(), strict=True))
        assert dict(await made.train(batch(2)))["learning_rate"] == FAST.learning_rate
        assert digest(made) != start

    asyncio.run(scenario())


def test_scorers_say_what_is_wrong() -> None:
    async def scenario() -> None:
        made, group = trainer(), batch(0).groups[0]
        for scorer in (TrainerScorer(made, "reference"), TrainerScorer(made, "value")):
            with pytest.raises(ScoringError):
                await scorer.score(group)
        await made.close()
        with pytest.raises(TrainerCrashed):
            await TrainerScorer(made, "policy").score(group)

    asyncio.run(scenario())


def test_a_model_that_cannot_be_packed_is_refused() -> None:

    model = tiny()
    forward = model.forward

    def twice(*args: Any, **kwargs: Any) -> Any:
        out = forward(*args, **kwargs)
        out.logits = 2 * out.logits
        return out

    model.forward = twice
    with pytest.raises(ConfigError, match="cannot be trained"):
        LocalTrainer(lambda: model, settings(), WeightStore())


@pytest.mark.parametrize(
    ("targets", "tied", "problem"),
    [
        (("q_proj", "lm_head"), False, "the head has no adapters"),
        (("q_proj", "embed_tokens"), True, "the head has no adapters"),
        (("nonsense",), True, "nonsense.* not found"),
    ],
)
def test_adapters_that_would_not_be_trained_are_refused(targets: tuple[str, ...], tied: bool, problem: str) -> None:
    pytest.importorskip("peft")
    with pytest.raises(ConfigError, match=f"lora_target.*{problem}"):
        trainer(settings(lora=LoraSettings(rank=2, targets=targets)), tied=tied)


def test_the_learning_rate_is_a_function_of_the_version() -> None:
    common = {"learning_rate": 1.0, "warmup_steps": 2, "max_steps": 6}
    rates = {
        kind: [round(OptimizerSettings(schedule=kind, **common).rate_at(version), 4) for version in range(7)]  # type: ignore[arg-type]
        for kind in ("constant", "linear", "cosine")
    }
    assert rates["constant"] == [0.5, 1, 1, 1, 1, 1, 1]
    assert rates["linear"] == [0.5, 1, 1, 0.75, 0.5, 0.25, 0]
    assert rates["cosine"] == [0.5, 1, 1, 0.8536, 0.5, 0.1464, 0]
    floor = OptimizerSettings(schedule="linear", lowest=0.2, **common)  # type: ignore[arg-type]
    assert [round(floor.rate_at(version), 4) for version in range(7)] == [0.5, 1, 1, 0.8, 0.6, 0.4, 0.2]


@pytest.mark.parametrize("tied", [True, False])
def test_a_step_says_what_it_computes(tied: bool) -> None:
    async def scenario() -> None:
        made = trainer(tied=tied)
        metrics = await made.train(batch(0))
        looked_up = 0 if tied else made.learner.policy.causal.get_input_embeddings().weight.numel()
        weights = sum(one.numel() for one in made.learner.policy.causal.parameters()) - looked_up
        assert metrics["tflop"] == pytest.approx(6e-12 * weights * metrics["packed_tokens"])
        assert "peak_tflops" not in metrics

    asyncio.run(scenario())


def test_the_event_loop_goes_on_while_a_step_is_computed() -> None:
    async def scenario() -> None:
        made = trainer()
        task = asyncio.create_task(made.train(batch(0, groups=20)))
        turns = 0
        while not task.done():
            await asyncio.sleep(0)
            turns += 1
        await task
        assert turns > 10

    asyncio.run(scenario())


def test_without_an_estimator_each_sample_brings_its_own_advantage() -> None:
    async def scenario() -> None:
        made, data = trainer(settings(advantages=None)), batch(0, members=2)
        metrics = await made.train(data)
        wanted = [one.advantage for group in data.groups for one in group.samples for _ in range(one.actions)]
        trained = [advantage for advantage in wanted if advantage]
        assert metrics["advantage_mean"] == pytest.approx(sum(trained) / len(trained))
        assert metrics["skipped_samples"] == sum(not one.advantage for group in data.groups for one in group.samples)

    asyncio.run(scenario())
