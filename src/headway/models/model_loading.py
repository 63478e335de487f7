"""Models and tokenizers from a resolved directory, with weights or as an empty architecture.

Guarantees: the network is never used. A model of `make_architecture_factory` has its matrices on the `meta` device and
every computed table, such as rotary frequencies, in place. It costs next to no memory or time, and is complete when
weights are put in. Tied tensors are one tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from headway.models.model_checks import check_model_directory

if TYPE_CHECKING:
    import torch
    from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

AttentionKind = Literal["auto", "fa2", "sdpa", "eager"]
_ATTENTION = {"auto": None, "fa2": "flash_attention_2", "sdpa": "sdpa", "eager": "eager"}


def load_model(
    path: Path | str, dtype: torch.dtype, *, attn: AttentionKind = "auto", quantized_on: str | None = None
) -> PreTrainedModel:
    """Load the model in evaluation mode on the CPU. `auto` leaves attention to `transformers`.

    With `quantized_on` its linear layers are put on that device in 4 bits (nf4), and compute in `dtype`.
    """
    from transformers import AutoModelForCausalLM

    directory = check_model_directory(Path(path), str(path))
    options = {} if quantized_on is None else _make_quantization(dtype, quantized_on)
    with hide_progress_bars():
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            directory, dtype=dtype, attn_implementation=_ATTENTION[attn], local_files_only=True, **options
        )
    return model.eval()


def _make_quantization(dtype: torch.dtype, device: str) -> dict[str, Any]:
    from transformers import BitsAndBytesConfig

    made = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=dtype, bnb_4bit_use_double_quant=True
    )
    return {"quantization_config": made, "device_map": {"": device}}


@contextmanager
def hide_progress_bars() -> Iterator[None]:
    """Keep `transformers` from drawing progress bars, which would break up a log, inside the context."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def load_tokenizer(path: Path | str) -> PreTrainedTokenizerBase:
    """Load the tokenizer with its chat template."""
    from transformers import AutoTokenizer

    directory = check_model_directory(Path(path), str(path))
    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(directory, local_files_only=True)
    return tokenizer


def make_architecture_factory(path: Path | str) -> Callable[[], PreTrainedModel]:
    """Return a function that makes a new model without weights at each call; the configuration is read now."""
    from copy import deepcopy

    from transformers import AutoConfig, AutoModelForCausalLM

    directory = check_model_directory(Path(path), str(path))
    config = AutoConfig.from_pretrained(directory, local_files_only=True)
    generation = _generation_config(directory)

    def make() -> PreTrainedModel:
        import torch

        with _on_meta_device():
            model: PreTrainedModel = AutoModelForCausalLM.from_config(deepcopy(config), dtype=torch.float32)
        if generation is not None:
            model.generation_config = deepcopy(generation)
        return model.eval()

    return make


def count_parameters(path: Path | str) -> int:
    """Return the number of parameters of the model at `path`, tied ones counted once. No weights are read."""
    return sum(parameter.numel() for parameter in make_architecture_factory(path)().parameters())


def max_sequence_length(path: Path | str) -> int | None:
    """Return the number of positions of the model at `path`; `None` if it does not say."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(check_model_directory(Path(path), str(path)), local_files_only=True)
    limit = getattr(config.get_text_config(), "max_position_embeddings", None)
    return limit if isinstance(limit, int) and limit > 0 else None


def find_end_tokens(
    source: Path | str | PreTrainedTokenizerBase, generation_config: GenerationConfig | None = None
) -> frozenset[int]:
    """Return the tokens that end an answer: the tokenizer's and those of the generation config.

    For a directory, all of its files are read.
    """
    if not isinstance(source, Path | str):
        return _to_token_ids(source.eos_token_id) | _to_token_ids(getattr(generation_config, "eos_token_id", None))
    from transformers import AutoConfig

    directory = Path(source)
    tokenizer = load_tokenizer(directory)
    config = AutoConfig.from_pretrained(directory, local_files_only=True)
    chosen = generation_config if generation_config is not None else _generation_config(directory)
    return find_end_tokens(tokenizer, chosen) | _to_token_ids(getattr(config.get_text_config(), "eos_token_id", None))


def _to_token_ids(found: int | Iterable[int] | None) -> frozenset[int]:
    return frozenset([found] if isinstance(found, int) else found or ())


def _generation_config(directory: Path) -> Any:
    from transformers import GenerationConfig

    if not (directory / "generation_config.json").is_file():
        return None
    return GenerationConfig.from_pretrained(directory, local_files_only=True)


def _on_meta_device() -> Any:
    """Make `torch.empty` use the `meta` device inside the context, in this thread: parameters, but nothing computed."""
    import torch
    from torch.overrides import TorchFunctionMode

    class EmptyOnMeta(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            chosen = dict(kwargs or {})
            if func is torch.empty:
                chosen["device"] = "meta"
            return func(*args, **chosen)

    return EmptyOnMeta()
