"""GGUF files as ordinary model directories: bf16 safetensors, tokenizer, chat template.

Guarantees: weights are dequantised, and tokenizer, head and padding become what docs/models.md says. A file that is not
GGUF, or ends in the middle of its header, raises `GgufFormatError` with the reason.
"""

from __future__ import annotations

import importlib
import json
import mmap
import struct
import warnings
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headway.errors import HeadwayError
from headway.extras import suggest_install
from headway.models.model_cache import make_once
from headway.models.model_checks import model_error

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


GGUF_MAGIC = b"GGUF"
_FORMATS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_VERSIONS = (2, 3)


class GgufFormatError(HeadwayError):
    """The file cannot be read as GGUF."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufHeader:
    """The metadata and tensor names that stand before the weights."""

    metadata: dict[str, Any]
    """Metadata by key. Of an array only its length is kept."""
    tensors: frozenset[str]

    @property
    def has_own_head(self) -> bool:
        """Whether the output layer is a tensor of its own, not the embedding."""
        return "output.weight" in self.tensors


def read_gguf_header(path: Path) -> GgufHeader:
    """Read the header of `path`, without the weights. Raise `GgufFormatError` if it is not one."""
    with path.open("rb") as file:
        if file.read(4) != GGUF_MAGIC:
            raise GgufFormatError("it does not begin with the letters GGUF")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            try:
                return _Reader(content).header()
            except (struct.error, KeyError, UnicodeDecodeError, OverflowError, ValueError) as error:
                raise GgufFormatError("its head is damaged or cut off") from error


class _Reader:
    """Reads values from the file one after the other."""

    def __init__(self, content: mmap.mmap) -> None:
        self._content = content
        self._place = len(GGUF_MAGIC)

    def header(self) -> GgufHeader:
        version = self._number("I")
        if version not in _VERSIONS:
            raise GgufFormatError(f"it is version {version} of the format, and {_VERSIONS} can be read")
        tensors, entries = self._number("Q"), self._number("Q")
        metadata = {self._string(): self._value(self._number("I")) for _ in range(entries)}
        return GgufHeader(metadata=metadata, tensors=frozenset(self._tensor() for _ in range(tensors)))

    def _number(self, form: str) -> Any:
        (value,) = struct.unpack_from(f"<{form}", self._content, self._place)
        self._place += struct.calcsize(f"<{form}")
        return value

    def _string(self) -> str:
        start = self._skip_string()
        return self._content[start : self._place].decode()

    def _skip_string(self) -> int:
        """Skip a string and return where it starts."""
        length = self._number("Q")
        start = self._place
        self._place += length
        if self._place > len(self._content):
            raise ValueError("beyond the end of the file")
        return start

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY:
            return self._number(_FORMATS[kind])
        inner, length = self._number("I"), self._number("Q")
        if inner in _FORMATS:
            self._place += length * struct.calcsize(f"<{_FORMATS[inner]}")
        else:
            for _ in range(length):
                self._skip_string() if inner == _STRING else self._value(inner)
        return length

    def _tensor(self) -> str:
        name = self._string()
        dimensions = self._number("I")
        self._place += 8 * dimensions + 4 + 8
        return name


_REVISION = 1
"""Raised when a conversion gives a different result, so that older results are not used."""
_SAMPLE = 1 << 20
_SINGLE_DIGITS = frozenset({"smollm", "starcoder", "refact"})
"""Names of pre-tokenizers that split as GPT-2 does, with every digit on its own."""
_GPT2_SPLITTING = frozenset({"gpt-2", "gpt2", "default", "mpt", "olmo", "phi-2"})
"""Names of pre-tokenizers that split exactly as GPT-2 does."""
_END_OF_TURN = ("<|im_end|>", "<|eot_id|>", "<|eot|>", "<end_of_turn>", "<|end|>", "<|end_of_text|>")
_PADDING = ("<pad>", "<|pad|>", "[PAD]", "<|finetune_right_pad_id|>", "<|endoftext|>", "<unk>")


def resolve_gguf(file: Path, root: Path, name: str) -> Path:
    """Return the directory that `file` was converted into, now or earlier; `name` is what the user wrote."""
    try:
        directory = root / "models" / gguf_cache_key(file)
        if directory.is_dir():
            return directory.resolve()
        header = read_gguf_header(file)
    except (GgufFormatError, OSError) as error:
        hint = "a .gguf file, a model directory, or a hub name; if it was downloaded, is it complete?"
        raise model_error(f"is no GGUF file: {error}", name, hint) from error

    def make(directory: Path) -> None:
        try:
            importlib.import_module("accelerate")  # transformers would name it in a ValueError
            write_converted_model(file.resolve(), header, directory)
        except ImportError as error:
            problem = f"is a GGUF file, whose conversion needs a package that is not installed: {error}"
            raise model_error(problem, name, suggest_install("train")) from error
        except Exception as error:
            kind = header.metadata.get("general.architecture", "unknown")
            problem = f"cannot be converted (architecture {kind}): {type(error).__name__}: {error}"
            hint = "is the file complete, and is there room on the disk? Otherwise give the original model"
            raise model_error(problem, name, hint) from error

    return make_once(directory.parent, directory.name, make)


def gguf_cache_key(file: Path) -> str:
    """Return a key that changes with the file's content, size or time. Two megabytes are read, not the whole file."""
    status = file.stat()
    seen = blake2b(f"{_REVISION} {status.st_size} {status.st_mtime_ns}".encode(), digest_size=8)
    with file.open("rb") as content:
        seen.update(content.read(_SAMPLE))
        content.seek(max(0, status.st_size - _SAMPLE))
        seen.update(content.read(_SAMPLE))
    stem = "".join(letter if letter.isalnum() or letter in "-_" else "-" for letter in file.stem)
    return f"{stem[:60]}-{seen.hexdigest()}"


def write_converted_model(file: Path, header: GgufHeader, directory: Path) -> None:
    """Convert `file` and write the result into `directory`."""
    from transformers import AutoConfig, GenerationConfig

    config = AutoConfig.from_pretrained(str(file.parent), gguf_file=file.name)  # read once, because it takes seconds
    tokenizer = _load_tokenizer(file, header, config)
    model = _load_model(file, header, config)
    ends = _end_token_ids(header, tokenizer)
    tokenizer.pad_token = _choose_padding(tokenizer, ends)
    for trace in ("is_local", "local_files_only"):
        tokenizer.init_kwargs.pop(trace, None)
    model.config.eos_token_id = tokenizer.eos_token_id
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=ends[0] if len(ends) == 1 else ends or None,
        pad_token_id=tokenizer.pad_token_id,
    )
    model.config.pad_token_id = tokenizer.pad_token_id
    if length := model.config.get_text_config().max_position_embeddings:
        tokenizer.model_max_length = length
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def _load_model(file: Path, header: GgufHeader, config: Any) -> PreTrainedModel:
    import torch
    import transformers

    options: dict[str, Any] = {}
    if hasattr(transformers, "GgufConfig"):  # newer versions would keep the weights quantised
        options["quantization_config"] = transformers.GgufConfig(dequantize=True)
    model: PreTrainedModel = transformers.AutoModelForCausalLM.from_pretrained(
        str(file.parent), gguf_file=file.name, config=config, dtype=torch.bfloat16, **options
    ).to(torch.bfloat16)
    model.config.tie_word_embeddings = not header.has_own_head
    if not header.has_own_head:
        model.tie_weights()
    vars(model.config).pop("_model_name_or_path", None)
    for owner, attribute in ((model, "hf_quantizer"), (model.config, "quantization_config")):
        if hasattr(owner, attribute):
            delattr(owner, attribute)
    for attribute in ("is_quantized", "quantization_method"):
        if attribute in vars(model):
            delattr(model, attribute)
    return model


def _load_tokenizer(file: Path, header: GgufHeader, config: Any) -> PreTrainedTokenizerBase:
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
    elif splitting not in _GPT2_SPLITTING and json.loads(backend.to_str())["pre_tokenizer"]["type"] == "ByteLevel":
        warnings.warn(
            f"{file.name} asks for text to be split as {splitting!r}, which is not known here: it is split as GPT-2 "
            "would, and some tokens may differ from those the model was trained with",
            stacklevel=2,
        )
    return tokenizer


def _end_token_ids(header: GgufHeader, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the end token first, then others that end a turn according to the file or its chat template."""
    vocabulary, template = tokenizer.get_vocab(), tokenizer.chat_template or ""
    turns = [vocabulary[token] for token in _END_OF_TURN if token in vocabulary and token in template]
    stated = [header.metadata.get(f"tokenizer.ggml.{key}_token_id") for key in ("eot", "eom")]
    found = [tokenizer.eos_token_id, *turns, *stated]
    return list(dict.fromkeys(token for token in found if token is not None))


def _choose_padding(tokenizer: PreTrainedTokenizerBase, ends: list[int]) -> str | None:
    """Return the file's padding token unless it ends turns; else a special token that nothing else uses."""
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
