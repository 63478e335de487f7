"""A character model of 0.1 million parameters that can nearly add: what tests and first trials train end to end.

Guarantees: an ordinary model directory, made from nothing but a seed in a few seconds of one core; the same seed gives
the same weights on the same machine. It answers `3+5=` in the right form and is right about one time in ten, which
leaves reinforcement learning something to amplify and everything to gain. It knows nothing else.

Its answers in pretraining are the sum plus an error from −7 to 7, small ones likelier: it learns to be roughly right.
However long it is pretrained, a sampled answer stays wrong most of the time; the likeliest answer would get better.
"""

from __future__ import annotations

import random
import string
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headway.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

ALPHABET = string.digits + string.ascii_letters + string.punctuation + " \n"
PAD, BEGIN, END, USER, ASSISTANT, SYSTEM, UNKNOWN = SPECIAL = (
    "<pad>",
    "<begin>",
    "<end>",
    "<user>",
    "<assistant>",
    "<system>",
    "<unknown>",
)
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ '<' + message['role'] + '>' + message['content'] + eos_token }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
)
STEPS = 150
"""About six seconds of one core."""
HEADS = 4
"""Of 16 numbers each, two to a key; two heads make them wide enough for engines that take no narrower ones."""
REVISION = 1
"""Raised when the same arguments give another model."""
_BATCH = 64
_LEARNING_RATE = 1e-3
_ERROR = 7
_LONGEST = 512
_LARGEST = 18


def make_tiny_model(
    directory: Path, *, seed: int = 0, alphabet: str = ALPHABET, steps: int = STEPS, heads: int = HEADS
) -> None:
    """Make tokenizer and model in `directory`; `steps` of pretraining on one-digit sums, 0 for random weights."""
    import torch

    if missing := set(f"{string.digits}+=") - set(alphabet):
        raise ConfigError(
            "lacks what sums are written with", key="alphabet", value=alphabet, hint="".join(sorted(missing))
        )
    tokenizer = make_character_tokenizer(alphabet)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # sums of floats depend on how they are shared out
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = make_random_model(tokenizer, heads)
        pretrain_on_sums(model, tokenizer, steps=steps, seed=seed)
    finally:
        torch.set_num_threads(threads)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def make_character_tokenizer(alphabet: str = ALPHABET) -> PreTrainedTokenizerFast:
    """One token a character; characters it does not know are one token, too."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: index for index, token in enumerate([*SPECIAL, *dict.fromkeys(alphabet)])}
    characters = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    characters.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    characters.decoder = decoders.Fuse()
    tokenizer: PreTrainedTokenizerFast = PreTrainedTokenizerFast(
        tokenizer_object=characters,
        bos_token=BEGIN,
        eos_token=END,
        pad_token=PAD,
        unk_token=UNKNOWN,
        additional_special_tokens=[USER, ASSISTANT, SYSTEM],
        clean_up_tokenization_spaces=False,
        model_max_length=_LONGEST,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


_SHAPE: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 176,
    "num_hidden_layers": 2,
    "max_position_embeddings": _LONGEST,
    "tie_word_embeddings": True,
    "initializer_range": 0.1,  # 0.02 is for wide models: this one learns more slowly with it
}


def make_random_model(tokenizer: PreTrainedTokenizerFast, heads: int = HEADS) -> PreTrainedModel:
    """Random weights, float32."""
    from transformers import LlamaConfig, LlamaForCausalLM

    model: PreTrainedModel = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
            num_attention_heads=heads,
            num_key_value_heads=heads // 2,
            **_SHAPE,
        )
    )
    return model


def pretrain_on_sums(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, *, steps: int, seed: int) -> None:
    """Plain language modelling of answers that are roughly right."""
    import torch

    optimizer = torch.optim.AdamW(model.parameters(), lr=_LEARNING_RATE, weight_decay=0.0)
    dice, encoded = random.Random(seed), _encoder(tokenizer)
    model.train()
    for _ in range(steps):
        chats = [_chat(dice) for _ in range(_BATCH)]
        ids, labels = _batch([(encoded(q), encoded(a)) for q, a in chats], tokenizer.pad_token_id)
        loss = model(input_ids=ids, labels=labels, use_cache=False).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    model.eval()


def _chat(dice: random.Random) -> tuple[str, str]:
    """A question as the chat template writes it, and an answer."""
    a, b = dice.randrange(10), dice.randrange(10)
    answer = -1
    while not 0 <= answer <= _LARGEST:
        answer = a + b + dice.randint(0, _ERROR) - dice.randint(0, _ERROR)
    return f"{BEGIN}{USER}{a}+{b}={END}{ASSISTANT}", f"{answer}{END}"


def _encoder(tokenizer: PreTrainedTokenizerFast) -> Callable[[str], list[int]]:
    """There are few texts, and each comes often."""
    return cache(lambda text: tokenizer.encode(text, add_special_tokens=False))


def _batch(chats: list[tuple[list[int], list[int]]], padding: int) -> tuple[Tensor, Tensor]:
    """Tokens, and the answers' among them as labels; padding is behind, where nobody sees it."""
    import torch

    longest = max(len(question) + len(answer) for question, answer in chats)
    ids, labels = torch.full((len(chats), longest), padding), torch.full((len(chats), longest), -100)
    for row, (question, answer) in enumerate(chats):
        ids[row, : len(question) + len(answer)] = torch.tensor(question + answer)
        labels[row, len(question) : len(question) + len(answer)] = torch.tensor(answer)
    return ids, labels
