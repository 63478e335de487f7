"""Synchronous GRPO in one file: the executable specification of what Headway computes at a headway of zero.

    python examples/reference_grpo.py --steps 150

Plain torch and transformers. Each step: a few prompts, a group of answers to each, rewards, group-relative advantages,
one clipped policy-gradient step. Nothing is fast here and everything is in plain sight: one prompt at a time, padded
rows, all logits, no packing, no cache of anything but the rollout's keys and values.

By default a tiny random decoder learns a toy task on a CPU: the prompt is a letter, the answer should be the letters
that follow it in the alphabet. Same seed, same numbers.

Legend: R rows (answers), T tokens of an answer, V vocabulary.
"""

# ruff: noqa: N806

from __future__ import annotations

import argparse
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedModel

ALPHABET = "abcdefgh"
BEGIN, END = len(ALPHABET), len(ALPHABET) + 1


@dataclass(frozen=True, kw_only=True)
class Options:
    """Everything there is to choose."""

    steps: int = 150
    prompts_per_step: int = 8
    group_size: int = 8
    answer_length: int = 2
    learning_rate: float = 2e-3
    max_grad_norm: float = 1.0
    clip: float = 0.2
    temperature: float = 1.0
    seed: int = 0


@dataclass(frozen=True, kw_only=True)
class Answer:
    """One sampled answer, what it was sampled with, and what it is worth."""

    prompt: list[int]
    tokens: list[int]
    logps: list[float]
    """Log-probability of each token under the policy that sampled it, after the temperature."""
    reward: float


def tiny_model(options: Options) -> PreTrainedModel:
    """0.1 million parameters, in float64 so that two ways to compute the same can be compared."""
    torch.manual_seed(options.seed)
    shape = GPT2Config(
        vocab_size=len(ALPHABET) + 2,
        n_positions=32,
        n_embd=64,
        n_layer=2,
        n_head=4,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=BEGIN,
        eos_token_id=END,
    )
    return GPT2LMHeadModel(shape).double()


def make_prompts(options: Options, generator: torch.Generator) -> list[list[int]]:
    """The beginning of a text, then a letter."""
    letters = torch.randint(len(ALPHABET), (options.prompts_per_step,), generator=generator)
    return [[BEGIN, int(letter)] for letter in letters]


def reward_of(prompt: list[int], tokens: list[int], options: Options) -> float:
    """The share of places that hold the right letter."""
    wanted = [(prompt[-1] + 1 + place) % len(ALPHABET) for place in range(options.answer_length)]
    return sum(got == want for got, want in zip(tokens, wanted, strict=False)) / options.answer_length


@torch.no_grad()
def sample_group(
    model: PreTrainedModel, prompt: list[int], options: Options, generator: torch.Generator
) -> list[Answer]:
    """`group_size` answers to one prompt, each ended by END or by its length."""
    rows = options.group_size
    tokens: list[list[int]] = [[] for _ in range(rows)]
    logps: list[list[float]] = [[] for _ in range(rows)]
    ids, cache = torch.tensor([prompt] * rows), None
    for _ in range(options.answer_length):
        out = model(input_ids=ids, past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        logp_RV = (out.logits[:, -1] / options.temperature).log_softmax(-1)
        ids = torch.multinomial(logp_RV.exp(), 1, generator=generator)
        for row in range(rows):
            if not tokens[row] or tokens[row][-1] != END:
                tokens[row].append(int(ids[row]))
                logps[row].append(float(logp_RV[row, ids[row]]))
    return [
        Answer(prompt=prompt, tokens=made, logps=behaviour, reward=reward_of(prompt, made, options))
        for made, behaviour in zip(tokens, logps, strict=True)
    ]


def group_advantages(rewards: list[float]) -> list[float]:
    """(R − mean) / (std + 1e-6) over the group."""
    values = torch.tensor(rewards, dtype=torch.float64)
    if bool((values == values[0]).all()):
        return [0.0] * len(rewards)
    return ((values - values.mean()) / (values.std(correction=0) + 1e-6)).tolist()


def group_logps(model: PreTrainedModel, group: list[Answer], options: Options) -> list[Tensor]:
    """Log-probability of every token of each answer under the weights of now, with gradient."""
    first, longest = len(group[0].prompt), max(len(answer.tokens) for answer in group)
    ids = torch.tensor([answer.prompt + answer.tokens + [END] * (longest - len(answer.tokens)) for answer in group])
    logits = model(input_ids=ids, use_cache=False).logits / options.temperature  # padding is behind: nobody sees it
    logp_RT = logits[:, first - 1 : -1].log_softmax(-1).gather(-1, ids[:, first:, None]).squeeze(-1)
    return [logp_T[: len(answer.tokens)] for logp_T, answer in zip(logp_RT, group, strict=True)]


def grpo_loss(model: PreTrainedModel, groups: list[list[Answer]], options: Options) -> Tensor:
    """−min(r·A, clip(r)·A) with r against the behaviour policy; the mean over all tokens of the step."""
    losses = []
    for group in groups:
        advantages = group_advantages([answer.reward for answer in group])
        for answer, advantage, logp_T in zip(group, advantages, group_logps(model, group, options), strict=True):
            ratio_T = (logp_T - torch.tensor(answer.logps, dtype=logp_T.dtype)).exp()
            clipped_T = ratio_T.clamp(1 - options.clip, 1 + options.clip)
            losses.append(-torch.minimum(ratio_T * advantage, clipped_T * advantage))
    return torch.cat(losses).mean()


def train_step(
    model: PreTrainedModel, optimizer: torch.optim.Optimizer, groups: list[list[Answer]], options: Options
) -> tuple[float, float]:
    """One update; its loss, and the norm of its gradient before the clip."""
    loss = grpo_loss(model, groups, options)
    optimizer.zero_grad()
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), options.max_grad_norm)
    optimizer.step()
    return float(loss.detach()), float(norm)


def main() -> None:
    """Train the tiny model and say how it goes."""
    parser = argparse.ArgumentParser(description="synchronous GRPO in one file")
    parser.add_argument("--steps", type=int, default=Options.steps)
    parser.add_argument("--seed", type=int, default=Options.seed)
    chosen = parser.parse_args()
    options = Options(steps=chosen.steps, seed=chosen.seed)
    torch.set_num_threads(1)
    model = tiny_model(options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.learning_rate, weight_decay=0.0)
    generator = torch.Generator().manual_seed(options.seed)
    for step in range(options.steps):
        prompts = make_prompts(options, generator)
        groups = [sample_group(model, prompt, options, generator) for prompt in prompts]
        loss, norm = train_step(model, optimizer, groups, options)
        rewards = [answer.reward for group in groups for answer in group]
        if step % 10 == 0 or step == options.steps - 1:
            print(f"step {step:3d}  reward {sum(rewards) / len(rewards):.3f}  loss {loss:+.6f}  grad {norm:.4f}")


if __name__ == "__main__":
    main()
