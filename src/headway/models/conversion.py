"""A GGUF file as an ordinary model directory: bf16 safetensors, tokenizer, chat template.

Guarantees: weights are unpacked, never left in blocks; the head is tied to the embedding unless the file has a head of
its own; a tokenizer that splits digits one by one does so again; the tokens that end a turn are in
`generation_config.json`; padding is not one of them where any other token will do. Weights that were quantised stay as
coarse as they were.
"""

from __future__ import annotations

import json
import warnings
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headway.errors import ConfigError
from headway.models.cache import made_once
from headway.models.header import Header, NotGguf, read_header

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_REVISION = 1
"""Raised when a conversion comes out differently, so that older ones are not used."""
_SAMPLE = 1 << 20
_SINGLE_DIGITS = frozenset({"smollm", "starcoder", "refact"})
"""Names under which GGUF files ask for GPT-2's splitting with every digit on its own."""
_PLAIN = frozenset({"gpt-2", "gpt2", "default", "mpt", "olmo", "phi-2"})
"""Names that ask for GPT-2's splitting and nothing else."""
_END_OF_TURN = ("<|im_end|>", "<|eot_id|>", "<|eot|>", "<end_of_turn>", "<|end|>", "<|end_of_text|>")
_PADDING = ("<pad>", "<|pad|>", "[PAD]", "<|finetune_right_pad_id|>", "<|endoftext|>", "<unk>")


def from_gguf(file: Path, root: Path, name: str) -> Path:
    """The directory that `file` was converted into, now or earlier; `name` is what the user wrote."""
    try:
        kept = root / "models" / key_of(file)
        if kept.is_dir():
            return kept.resolve()
        header = read_header(file)
    except (NotGguf, OSError) as error:
        hint = "a .gguf file, a model directory, or a hub name; if it was downloaded, is it complete?"
        raise ConfigError(f"is no GGUF file: {error}", key="pretrain", value=name, hint=hint) from error

    def make(directory: Path) -> None:
        try:
            convert(file.resolve(), header, directory)
        except ImportError as error:
            raise ConfigError(
                f"GGUF files need a package that is not here: {error}",
                key="pretrain",
                value=name,
                hint="pip install 'headway[train]'",
            ) from error
        except Exception as error:
            kind = header.metadata.get("general.architecture", "unknown")
            raise ConfigError(
                f"cannot be converted (architecture {kind}): {type(error).__name__}: {error}",
                key="pretrain",
                value=name,
                hint="is the file complete, and is there room on the disk? Otherwise give the original model",
            ) from error

    return made_once(kept.parent, kept.name, make)


def key_of(file: Path) -> str:
    """Changes with the file's content, size or time. Reads two megabytes, not all of it."""
    status = file.stat()
    seen = blake2b(f"{_REVISION} {status.st_size} {status.st_mtime_ns}".encode(), digest_size=8)
    with file.open("rb") as content:
        seen.update(content.read(_SAMPLE))
        content.seek(max(0, status.st_size - _SAMPLE))
        seen.update(content.read(_SAMPLE))
    stem = "".join(letter if letter.isalnum() or letter in "-_" else "-" for letter in file.stem)
    return f"{stem[:60]}-{seen.hexdigest()}"


def convert(file: Path, header: Header, directory: Path) -> None:
    """Write what `file` holds into `directory`."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(str(file.parent), gguf_file=file.name)  # once: reading it takes seconds
    tokenizer = _tokenizer(file, header, config)
    model = _model(file, header, config)
    ends = _ends(header, tokenizer)
    tokenizer.pad_token = _padding(tokenizer, ends)
    for trace in ("is_local", "local_files_only"):
        tokenizer.init_kwargs.pop(trace, None)
    model.config.eos_token_id = tokenizer.eos_token_id
    model.generation_config = _generation(tokenizer, ends)
    model.config.pad_token_id = tokenizer.pad_token_id
    if length := model.config.get_text_config().max_position_embeddings:
        tokenizer.model_max_length = length
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def _model(file: Path, header: Header, config: Any) -> PreTrainedModel:
    import torch
    import transformers

    options: dict[str, Any] = {}
    if hasattr(transformers, "GgufConfig"):  # newer ones would keep the blocks
        options["quantization_config"] = transformers.GgufConfig(dequantize=True)
    model: PreTrainedModel = transformers.AutoModelForCausalLM.from_pretrained(
        str(file.parent), gguf_file=file.name, config=config, dtype=torch.bfloat16, **options
    ).to(torch.bfloat16)
    model.config.tie_word_embeddings = not header.own_head
    if not header.own_head:
        model.tie_weights()
    vars(model.config).pop("_model_name_or_path", None)
    return _plain(model)


def _plain(model: PreTrainedModel) -> PreTrainedModel:
    """As if it had never been quantised."""
    for owner, attribute in ((model, "hf_quantizer"), (model.config, "quantization_config")):
        if hasattr(owner, attribute):
            delattr(owner, attribute)
    for attribute in ("is_quantized", "quantization_method"):
        if attribute in vars(model):
            delattr(model, attribute)
    return model


def _tokenizer(file: Path, header: Header, config: Any) -> PreTrainedTokenizerBase:
    from tokenizers import pre_tokenizers
    from transformers import AutoTokenizer

    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
        str(file.parent), gguf_file=file.name, config=config
    )
    backend = tokenizer.backend_tokenizer
    splitting = header.metadata.get("tokenizer.ggml.pre", "default")
    if header.metadata.get("tokenizer.ggml.model") != "gpt2":
        return tokenizer
    if splitting in _SINGLE_DIGITS:
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=True, use_regex=True),
            ]
        )
    elif splitting not in _PLAIN and json.loads(backend.to_str())["pre_tokenizer"]["type"] == "ByteLevel":
        warnings.warn(
            f"{file.name} asks for text to be split as {splitting!r}, which is not known here: it is split as GPT-2 "
            "would, and some tokens may differ from those the model was trained with",
            stacklevel=2,
        )
    return tokenizer


def _ends(header: Header, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The end token first, then others that end a turn according to the file or its chat template."""
    vocabulary, template = tokenizer.get_vocab(), tokenizer.chat_template or ""
    turns = [vocabulary[token] for token in _END_OF_TURN if token in vocabulary and token in template]
    stated = [header.metadata.get(f"tokenizer.ggml.{key}_token_id") for key in ("eot", "eom")]
    found = [tokenizer.eos_token_id, *turns, *stated]
    return list(dict.fromkeys(token for token in found if token is not None))


def _padding(tokenizer: PreTrainedTokenizerBase, ends: list[int]) -> str | None:
    """The file's own unless it ends turns; else a special token that nothing else uses."""
    vocabulary, template = tokenizer.get_vocab(), tokenizer.chat_template or ""
    special = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
    current: str | None = tokenizer.pad_token
    taken = {tokenizer.bos_token, *(token for token, index in vocabulary.items() if index in ends)}
    unused = sorted(
        (token for token in special - taken - {tokenizer.unk_token} if token not in template),
        key=lambda token: vocabulary[token],
    )
    candidates: list[str | None] = [current, *(name for name in _PADDING if name in special), *unused]
    return next((token for token in candidates if token is not None and token not in taken), current)


def _generation(tokenizer: PreTrainedTokenizerBase, ends: list[int]) -> Any:
    from transformers import GenerationConfig

    return GenerationConfig(
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=ends[0] if len(ends) == 1 else ends or None,
        pad_token_id=tokenizer.pad_token_id,
    )
