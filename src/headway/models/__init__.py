"""Models by name: what `pretrain:` says, resolved to a directory and loaded from it.

    directory = resolve("smollm2-135m-instruct")
    model, tokenizer = load_model(directory, torch.float32), load_tokenizer(directory)

Importing it imports neither torch nor transformers.
"""

from headway.models.cache import cache_root
from headway.models.loading import (
    architecture,
    end_tokens,
    load_model,
    load_tokenizer,
    longest_sequence,
    parameter_count,
)
from headway.models.names import built_in_names, resolve

__all__ = [
    "architecture",
    "built_in_names",
    "cache_root",
    "end_tokens",
    "load_model",
    "load_tokenizer",
    "longest_sequence",
    "parameter_count",
    "resolve",
]
