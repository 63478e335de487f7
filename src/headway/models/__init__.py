"""Models by name: the value of `pretrain:` is resolved to a directory and loaded from it.

    directory = resolve_model("smollm2-135m-instruct")
    model, tokenizer = load_model(directory, torch.float32), load_tokenizer(directory)

Importing this package imports neither torch nor transformers.
"""
