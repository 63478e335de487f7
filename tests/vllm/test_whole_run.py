"""`headway train` with a vLLM that it starts itself: it learns on it, and outlives its death."""

from __future__ import annotations

import os
import signal
import zlib
from pathlib import Path
from typing import Any

import pytest

from tests.runs.factory import Run, Runs, audit, count, events, segments
from tests.vllm.server_pool import BASE, PYTHON, gone


def lottery(text: str, task: Any) -> float:
    """Other answers have other rewards, so that every group has something to say."""
    return zlib.crc32(text.encode()) / 2**32


def save_model(directory: str) -> None:
    """A character model with heads that vLLM takes: 32 wide."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from headway.models.tiny_model import make_character_tokenizer

    torch.manual_seed(0)
    tokenizer = make_character_tokenizer()
    names = {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    shape = {"hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 512}
    config = LlamaConfig(vocab_size=len(tokenizer), tie_word_embeddings=True, **names, **shape, **heads)
    LlamaForCausalLM(config).save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def server_of(run: Run) -> list[int]:
    """The processes of the run's server: guard, server, engine core."""
    log, found = str(run.directory / "logs" / "engine-0-server.log"), []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if str((entry / "fd" / "1").readlink()) == log:
                found.append(int(entry.name))
        except OSError:
            continue
    return sorted(found)


def test_a_run_trains_on_a_server_of_its_own_and_outlives_its_death(runs: Runs, tmp_path: Path) -> None:
    model, directory, before = tmp_path / "model", tmp_path / "run", segments()
    assert runs.template.call(f"{__name__}:save_model", str(model)) == 0
    run = Runs(runs.template, model).train(
        directory,
        f"{BASE}.strategy_name=vllm",
        f"{BASE}.strategy_config.launch=true",
        f"{BASE}.strategy_config.server_python={PYTHON}",
        f"{BASE}.strategy_config.server_args={{enforce-eager: true}}",
        "actor_infer.generating_args.temperature=0.7",
        f"rewards.arithmetic.reward_fn={Path(__file__)}:lottery",
        "async_generation_ratio=1",
        "max_steps=16",
        "processes=true",
    )
    assert run.until(lambda: count(directory, "step.end") >= 2, 300.0), run.text
    first = server_of(run)
    assert len(first) >= 3
    os.kill(first[1], signal.SIGKILL)
    assert run.until(lambda: gone(first, 0.0), 60.0), run.text
    assert run.until(lambda: server_of(run), 60.0), run.text
    second = server_of(run)
    assert run.end() == 0, run.text
    assert gone(second)
    audit(directory)
    steps = [event.data for event in events(directory, "step.end")]
    assert len(steps) == 16 and all(step["train/grad_norm"] > 0 for step in steps)
    fresh = [step for step in steps if step["train/lag_max"] == 0]
    assert fresh, "the first step, and later ones where the server was faster"
    for step in fresh:  # the server's log-probabilities are the trainer's own; embedding and output layer are tied
        assert step["train/ratio_mean"] == pytest.approx(1.0, abs=1e-4)
        assert step["train/ratio_max"] == pytest.approx(1.0, abs=2e-3)
    assert not (directory / "served" / "engine-0").exists()
    assert segments() <= before
