"""From a row to tokens: columns, messages, templates, lengths."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unicodedata import normalize

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.config import DataArgs, load_config
from headway.data import make_sources
from headway.data.prompts import PromptBuilder
from headway.errors import ConfigError
from tests.data_sources.factory import Characters, configured, epoch, sources, sums, text_of, write

MESSAGES = [{"role": "system", "content": "S"}, {"role": "user", "content": "Q"}]


def only(tmp_path: Path, row: dict[str, Any], **args: Any) -> Any:
    name = write(tmp_path / "a.jsonl", [row])
    (task,) = epoch(sources({"file_name": name, "answer": None, **args}).train)
    return task


@pytest.mark.parametrize(
    ("row", "args", "text"),
    [
        ({"prompt": "Q"}, {}, "<u>Q<a>"),
        ({"prompt": "Q"}, {"system": "be brief"}, "<s>be brief<u>Q<a>"),
        ({"prompt": "Q"}, {"question_template": "{prompt}\n\\boxed{}?"}, "<u>Q\n\\boxed{}?<a>"),
        ({"prompt": "Q"}, {"chat_template_kwargs": {"answer": "<A>", "unheard_of": [1]}}, "<u>Q<A>"),
        ({"prompt": "Q"}, {"template": "none"}, "\x01Q"),
        ({"prompt": "Q"}, {"template": "none", "question_template": "[{prompt}]"}, "\x01[Q]"),
        ({"prompt": MESSAGES}, {}, "<s>S<u>Q<a>"),
        ({"prompt": json.dumps(MESSAGES)}, {}, "<s>S<u>Q<a>"),
        ({"prompt": '[{"a": 1}]'}, {}, '<u>[{"a": 1}]<a>'),
        ({"prompt": MESSAGES}, {"system": "other", "question_template": "({prompt})"}, "<s>S<u>(Q)<a>"),
        ({"extra": {"question": "Q"}}, {"prompt": "extra.question"}, "<u>Q<a>"),
        ({"extra.question": "Q"}, {"prompt": "extra.question"}, "<u>Q<a>"),
    ],
)
def test_a_row_becomes_the_text_that_was_asked_for(
    tmp_path: Path, row: dict[str, Any], args: dict[str, Any], text: str
) -> None:
    task = only(tmp_path, row, **args)
    assert text_of(task) == text
    assert task.data == row


def test_the_answer_stands_under_its_own_name(tmp_path: Path) -> None:
    row = {"prompt": "Q", "reward_model": {"ground_truth": "7", "style": "rule"}}
    task = only(tmp_path, row, answer="reward_model.ground_truth")
    assert task.data == {**row, "reward_model.ground_truth": "7"}


def test_a_template_by_name_is_the_tokenizers_own_and_said_so(tmp_path: Path) -> None:
    made = sources({"file_name": write(tmp_path / "a.jsonl", sums(1)), "template": "qwen2_5"})
    assert text_of(made.train.task(0)) == "<u>0+1<a>"
    assert made.notes == ("actor_train.data_args.template = 'qwen2_5': the tokenizer's own chat template is used",)


@pytest.mark.parametrize(
    ("args", "row", "said"),
    [
        ({"question_template": "Q: prompt"}, {"prompt": "Q"}, r"question_template = 'Q: prompt': has no \{prompt\}"),
        ({"template": "none", "system": "S"}, {"prompt": "Q"}, "system = 'S': needs a chat template"),
        ({"template": "none"}, {"prompt": MESSAGES}, r"a\.jsonl:1: several messages need a chat template"),
    ],
)
def test_a_prompt_that_cannot_be_made_is_refused(
    tmp_path: Path, args: dict[str, Any], row: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        only(tmp_path, row, **args)


LENGTHS = [{"prompt": "x" * length, "answer": "1"} for length in (5, 59, 58, 7, 80)]
"""With the six characters of the template, 58 just fits into 64."""


@pytest.mark.parametrize(
    ("policy", "kept", "done"), [("drop", [11, 64, 13], "left out"), ("truncate", [11, 64, 64, 13, 64], "cut")]
)
def test_prompts_that_are_too_long_are_left_out_or_cut_and_counted(
    tmp_path: Path, policy: str, kept: list[int], done: str
) -> None:
    name = write(tmp_path / "a.jsonl", LENGTHS)
    made = sources({"file_name": name, "too_long": policy, "shuffle": False})
    tasks = epoch(made.train)
    assert [len(task.prompt) for task in tasks] == kept
    assert all(text_of(task).endswith("x<a>") for task in tasks)
    (note,) = made.notes
    assert f"2 of 5 prompts are longer than prompt_length = 64 tokens and {done}" in note
    assert f"the longest has 86 ({name}:5)" in note


def test_prompts_that_are_too_long_are_refused_where_that_is_asked_for_or_none_is_left(tmp_path: Path) -> None:
    name = write(tmp_path / "a.jsonl", LENGTHS)
    with pytest.raises(
        ConfigError, match=r"2 of 5 prompts are longer .*longest has 86 .*a\.jsonl:5.*prompt_length: 86"
    ):
        sources({"file_name": name, "too_long": "error"})
    with pytest.raises(ConfigError, match=r"5 of 5 prompts .*none is left; the shortest has 11, the longest has 86"):
        sources({"file_name": name}, prompt_length=8)


class Expanding(Characters):
    """A tokenizer that takes characters apart as far as Unicode can, with a token for every byte."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return [1] * add_special_tokens + list(normalize("NFKD", text).encode())


@settings(max_examples=60)
@given(text=st.text(min_size=1), raw=st.booleans(), system=st.booleans())
def test_no_prompt_has_more_tokens_than_it_can_have_at_most(text: str, raw: bool, system: bool) -> None:
    args = DataArgs(template="none" if raw else None, system="S" if system and not raw else None)
    prompts = PromptBuilder(Expanding(), args, key="data_args")
    messages = prompts.make_messages({"prompt": text}, "here")
    assert len(prompts.tokenize_row({"prompt": text})) <= prompts.max_length(messages, "here")


def test_the_longest_expansions_there_are_stay_within_the_bound() -> None:
    prompts = PromptBuilder(Expanding(), DataArgs(), key="data_args")
    characters = [chr(code) for code in range(0x80, 0x20000) if not 0xD800 <= code < 0xE000]
    longest = [one for one in characters if len(normalize("NFKD", one).encode()) > 4 * len(one.encode())]
    assert "\ufdfa" in longest
    for character in longest:
        row = {"prompt": character * 9}
        assert len(prompts.tokenize_row(row)) <= prompts.max_length(prompts.make_messages(row, "here"), "here"), repr(
            character
        )


def test_a_tokenizer_of_transformers_is_asked_in_batches_and_adds_no_special_token_twice(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    transformers = pytest.importorskip("transformers")
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    inner = tokenizers.Tokenizer(tokenizers.models.BPE(vocab={c: n for n, c in enumerate(alphabet)}, merges=[]))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = tokenizers.decoders.ByteLevel()
    inner.add_special_tokens(["<s>", "</s>"])
    inner.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", inner.token_to_id("<s>"))]
    )
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<s>", eos_token="</s>")
    name = write(tmp_path / "a.jsonl", [{"prompt": "3+4é", "answer": "7"}, {"prompt": "y" * 70, "answer": "7"}])
    with pytest.raises(ConfigError, match=r"a\.jsonl:1: the tokenizer's chat template fails.*template: none"):
        make_sources(configured({"file_name": name}), fast)
    fast.chat_template = (
        "<s>{% for m in messages %}[{{ m.role }}]{{ m.content }}</s>{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    made = make_sources(configured({"file_name": name, "shuffle": False, "too_long": "truncate"}), fast)
    first, second = epoch(made.train)
    assert fast.decode(first.prompt) == "<s>[user]3+4é</s>[assistant]"
    assert len(second.prompt) == 64
    assert fast.decode(second.prompt).endswith("y</s>[assistant]")
    raw = make_sources(configured({"file_name": name, "shuffle": False, "template": "none"}), fast)
    assert fast.decode(epoch(raw.train)[0].prompt) == "<s>3+4é"


QWEN_LIKE = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}{% if add_generation_prompt %}[assistant]"
    "{% if enable_thinking is defined and enable_thinking is false %}<think></think>{% endif %}{% endif %}"
    "{% if fail is defined %}{{ raise_exception('no such mode') }}{% endif %}"
)


def test_variables_of_the_configuration_reach_a_template_of_jinja(tmp_path: Path) -> None:
    tokenizers, transformers = pytest.importorskip("tokenizers"), pytest.importorskip("transformers")
    inner = tokenizers.Tokenizer(tokenizers.models.BPE(vocab={chr(n): n for n in range(128)}, merges=[]))
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=inner, chat_template=QWEN_LIKE)
    name = write(tmp_path / "a.jsonl", sums(1))

    def prompt(*overrides: str, held_out: bool = False) -> str:
        more = {"validation": {"data_args": {"file_name": name}}} if held_out else {}
        given = {"prompt_length": 64, "response_length": 16, "actor_train": {"data_args": {"file_name": name}}}
        made = make_sources(load_config({**given, **more}, list(overrides)), fast)
        (task,) = epoch(made.validation if held_out else made.train)
        return text_of(task)

    key = "actor_train.data_args.chat_template_kwargs"
    assert prompt() == "[user]0+1[assistant]"
    for spelling in (key, "data.apply_chat_template_kwargs"):
        assert prompt(f"{spelling}.enable_thinking=false") == "[user]0+1[assistant]<think></think>"
    assert prompt(f"{key}.enable_thinking=false", held_out=True).endswith("<think></think>")
    assert prompt("data.apply_chat_template_kwargs={}") == "[user]0+1[assistant]"
    own = "validation.data_args.chat_template_kwargs.enable_thinking=true"
    assert prompt(f"{key}.enable_thinking=false", own, held_out=True).endswith("[assistant]")
    for bad, problem in (("fail=true", "no such mode"), ("tokenize=true", "tokenize")):
        with pytest.raises(ConfigError, match=rf"a\.jsonl:1: .*{problem}.*chat_template_kwargs gives it"):
            prompt(f"{key}.{bad}")
    with pytest.raises(ConfigError, match=r"chat_template_kwargs.*needs a chat template"):
        prompt(f"{key}.enable_thinking=false", "actor_train.data_args.template=none")
