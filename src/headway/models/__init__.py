"""Models by name: the value of `pretrain:` is resolved to a directory and loaded from it.

    directory = resolve_model("smollm2-135m-instruct")
    model, tokenizer = load_model(directory, torch.float32), load_tokenizer(directory)

Importing this package imports neither torch nor transformers.
"""

from headway.models.model_cache import cache_root
from headway.models.model_loading import (
    count_parameters,
    find_end_tokens,
    load_model,
    load_tokenizer,
    make_architecture_factory,
    max_sequence_length,
)
from headway.models.model_names import built_in_names, resolve_model

__all__ = [
    "built_in_names",
    "cache_root",
    "count_parameters",
    "find_end_tokens",
    "load_model",
    "load_tokenizer",
    "make_architecture_factory",
    "max_sequence_length",
    "resolve_model",
]
