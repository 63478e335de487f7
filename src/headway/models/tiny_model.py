"""A character model of 0.1 million parameters that can nearly add, for tests and first trials.

Guarantees: an ordinary model directory, made from a seed in a few seconds of one core; the same seed gives the same
weights on the same machine. The model answers `3+5=` in the right form and is right about one time in ten, so
reinforcement learning has something to amplify. It knows nothing else.

Its answers in pretraining are the sum plus an error from −7 to 7, where small errors are likelier. However long it is
pretrained, a sampled answer stays wrong most of the time; only the likeliest answer would get better.
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
SPECIAL = tuple(f"<{name}>" for name in ("pad", "begin", "end", "user", "assistant", "system", "unknown"))
PAD, BEGIN, END, USER, ASSISTANT, SYSTEM, UNKNOWN = SPECIAL
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ '<' + message['role'] + '>' + message['content'] + eos_token }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
)
PRETRAINING_STEPS = 150
"""Pretraining steps: about six seconds of one core."""
ATTENTION_HEADS = 4
"""Attention heads of 16 numbers, two to a key. With two heads they are wide enough for engines that need 32."""
REVISION = 1
"""Raised when the same arguments give another model."""
_BATCH = 64
_LEARNING_RATE = 1e-3
_MAX_ERROR = 7
_MAX_LENGTH = 512
_MAX_SUM = 18


def make_tiny_model(
    directory: Path,
    *,
    seed: int = 0,
    alphabet: str = ALPHABET,
    steps: int = PRETRAINING_STEPS,
    heads: int = ATTENTION_HEADS,
) -> None:
    """Make tokenizer and model in `directory`, pretrained for `steps` on one-digit sums; 0 gives random weights."""
    import torch

    if missing := set(f"{string.digits}+=") - set(alphabet):
        raise ConfigError(
            "lacks what sums are written with", key="alphabet", value=alphabet, hint="".join(sorted(missing))
        )
    tokenizer = make_character_tokenizer(alphabet)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the result of float sums depends on the number of threads
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
    """Make a tokenizer with one token per character and one for all unknown characters."""
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
        model_max_length=_MAX_LENGTH,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


_CONFIG: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 176,
    "num_hidden_layers": 2,
    "max_position_embeddings": _MAX_LENGTH,
    "tie_word_embeddings": True,
    "initializer_range": 0.1,  # the usual 0.02 suits wide models; this narrow one would learn more slowly
}


def make_random_model(tokenizer: PreTrainedTokenizerFast, heads: int = ATTENTION_HEADS) -> PreTrainedModel:
    """Make the model with random weights in float32."""
    from transformers import LlamaConfig, LlamaForCausalLM

    model: PreTrainedModel = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
            num_attention_heads=heads,
            num_key_value_heads=heads // 2,
            **_CONFIG,
        )
    )
    return model


def pretrain_on_sums(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, *, steps: int, seed: int) -> None:
    """Train the model to predict answers that are roughly right."""
    import torch

    optimizer = torch.optim.AdamW(model.parameters(), lr=_LEARNING_RATE, weight_decay=0.0)
    rng, encoded = random.Random(seed), _make_encoder(tokenizer)
    model.train()
    for _ in range(steps):
        chats = [_draw_chat(rng) for _ in range(_BATCH)]
        ids, labels = _make_batch([(encoded(q), encoded(a)) for q, a in chats], tokenizer.pad_token_id)
        loss = model(input_ids=ids, labels=labels, use_cache=False).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    model.eval()


def _draw_chat(rng: random.Random) -> tuple[str, str]:
    """Return a question as the chat template writes it, and an answer."""
    a, b = rng.randrange(10), rng.randrange(10)
    answer = -1
    while not 0 <= answer <= _MAX_SUM:
        answer = a + b + rng.randint(0, _MAX_ERROR) - rng.randint(0, _MAX_ERROR)
    return f"{BEGIN}{USER}{a}+{b}={END}{ASSISTANT}", f"{answer}{END}"


def _make_encoder(tokenizer: PreTrainedTokenizerFast) -> Callable[[str], list[int]]:
    """Return a cached encoder, because there are few texts and each comes often."""
    return cache(lambda text: tokenizer.encode(text, add_special_tokens=False))


def _make_batch(chats: list[tuple[list[int], list[int]]], padding: int) -> tuple[Tensor, Tensor]:
    """Return tokens and labels, which are the tokens of answers; padding is at the end, where no token sees it."""
    import torch

    longest = max(len(question) + len(answer) for question, answer in chats)
    ids, labels = torch.full((len(chats), longest), padding), torch.full((len(chats), longest), -100)
    for row, (question, answer) in enumerate(chats):
        ids[row, : len(question) + len(answer)] = torch.tensor(question + answer)
        labels[row, len(question) : len(question) + len(answer)] = torch.tensor(answer)
    return ids, labels
