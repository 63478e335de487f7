"""A tiny decoder and batches for it."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from headway.types import (
    Batch,
    Episode,
    ExpertRouting,
    FinishReason,
    Generation,
    Sample,
    SampleGroup,
    Score,
    Task,
    Turn,
    VersionRun,
)

VOCABULARY = 23


def tiny(*, tied: bool = True, seed: int = 0, layers: int = 2, hidden: int = 32) -> Any:
    """A Llama of a few thousand parameters; two key heads for four query heads."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=hidden,
            intermediate_size=2 * hidden,
            num_hidden_layers=layers,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=256,
            tie_word_embeddings=tied,
            bos_token_id=1,
            eos_token_id=2,
        )
    )


def small(kind: str, **options: Any) -> Any:
    """A model of any family with eager attention, of the size of `tiny`."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    shape = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 64,
        "pad_token_id": 0,
    }
    config = AutoConfig.for_model(kind, **(shape | options))
    return AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()


def exact(*, seed: int = 0) -> Any:
    """A GPT-2: no step of it is forced into float32, so float64 shows differences down to 1e-15."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(seed)
    return GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, n_positions=256, n_embd=32, n_layer=2, n_head=4))


def generation(dice: random.Random, length: int, versions: Sequence[int] = (0,)) -> Generation:
    first = length // len(versions)
    counts = [*[first] * (len(versions) - 1), length - first * (len(versions) - 1)]
    return Generation(
        actions=tuple(dice.randrange(VOCABULARY) for _ in range(length)),
        logps=tuple(-dice.uniform(2.0, 4.0) for _ in range(length)),
        runs=tuple(VersionRun(version=v, count=n) for v, n in zip(versions, counts, strict=True) if n),
        finish=FinishReason.STOP,
    )


def sample(
    name: str, dice: random.Random, prompt: Sequence[int], *, reward: float, turns: int = 1, longest: int = 9
) -> Sample:
    made = []
    for index in range(turns):
        seen = prompt if not index else tuple(dice.randrange(VOCABULARY) for _ in range(dice.randint(1, 4)))
        made.append(Turn(observation=seen, generation=generation(dice, dice.randint(1, longest))))
    episode = Episode(sample_id=name, task=Task(position=0, prompt=tuple(prompt)), turns=tuple(made))
    actions = sum(len(turn.generation.actions) for turn in made)
    return Sample(
        sample_id=name,
        episode=episode,
        oldest=0,
        newest=0,
        actions=actions,
        score=Score(value=reward),
        advantage=reward,
    )


def group(number: int, *, members: int = 4, turns: int = 1, longest: int = 9, flat: bool = False) -> SampleGroup:
    dice = random.Random(number)
    prompt = tuple(dice.randrange(VOCABULARY) for _ in range(dice.randint(3, 12)))
    rewards = [0.5] * members if flat else [dice.choice((0.0, 1.0, 0.25)) for _ in range(members)]
    if not flat:
        rewards[:2] = [0.0, 1.0]
    samples = tuple(
        sample(f"{number}.{index}.0", dice, prompt, reward=reward, turns=turns, longest=longest)
        for index, reward in enumerate(rewards)
    )
    return SampleGroup(group_id=number, task=Task(position=number, prompt=prompt), samples=samples)


def add_routing(batch: Batch, *, layers: int = 2, experts: int = 4) -> Batch:
    """Give every token two experts that no router has chosen, as an engine reports them."""
    groups = []
    for group in batch.groups:
        samples = []
        for sample in group.samples:
            dice, turns, length = random.Random(sample.sample_id), [], 0
            for index, turn in enumerate(sample.episode.turns):
                seen = turn.observation if index or len(turn.observation) else group.task.prompt
                start = max(length - 1, 0)
                length += len(seen) + len(turn.generation.actions)
                tokens = length - 1 - start
                data = b"".join(bytes(dice.sample(range(experts), 2)) for _ in range(tokens * layers))
                routing = ExpertRouting(start=start, layers=layers, experts=2, width=1, data=data)
                turns.append(replace(turn, generation=replace(turn.generation, routing=routing)))
            samples.append(replace(sample, episode=replace(sample.episode, turns=tuple(turns))))
        groups.append(replace(group, samples=tuple(samples)))
    return replace(batch, groups=tuple(groups))


def batch(trained: int = 0, *, groups: int = 3, **options: Any) -> Batch:
    made = tuple(group(100 * trained + index, **options) for index in range(groups))
    return Batch(trained=trained, groups=made)
