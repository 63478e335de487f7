"""What is said to vLLM and what is read from it; no vLLM is needed for either."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from headway.engines.servers.server_process import LaunchSettings
from headway.engines.streaming_engine import BackendLost, StreamRequest
from headway.engines.vllm.vllm_core import make_engine_arguments, make_sampling_arguments, output_to_chunk
from headway.errors import ConfigError
from headway.types import FinishReason, SamplingParams

LAUNCH = {"model": "/model", "port": 0, "slots": 8, "context_tokens": 256, "dtype": "float32", "seed": 3}
KNOWN = {"model", "dtype", "max_num_seqs", "logprobs_mode", "enforce_eager"}


def test_the_engine_is_started_with_what_a_run_needs() -> None:
    found = make_engine_arguments(LaunchSettings(**LAUNCH, extra={"enforce-eager": True}), KNOWN)  # type: ignore[arg-type]
    wanted = {"model": "/model", "max_num_seqs": 8, "max_model_len": 256, "dtype": "float32", "seed": 3}
    assert found.items() >= {**wanted, "logprobs_mode": "processed_logprobs", "enforce_eager": True}.items()
    assert "kv_cache_memory_bytes" not in found, "nobody knows what this model needs"


@pytest.mark.parametrize(("option", "said"), [("nonsense", "no such option"), ("logprobs-mode", "what a run needs")])
def test_options_that_vllm_does_not_know_or_that_a_run_needs_are_refused(option: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        make_engine_arguments(LaunchSettings(**LAUNCH, extra={option: 1}), KNOWN)  # type: ignore[arg-type]


def test_a_checkpoint_has_no_say_in_how_tokens_are_drawn() -> None:
    params = SamplingParams(max_new_tokens=9, temperature=0.7, top_p=0.9, top_k=-1, stop=("x",))
    request = StreamRequest(key="a", prompt=[1], max_tokens=5, params=params, end_tokens=[7], label="0")
    found = make_sampling_arguments(request)
    wanted = {"max_tokens": 5, "temperature": 0.7, "top_p": 0.9, "top_k": -1, "stop": ["x"], "stop_token_ids": [7]}
    assert found.items() >= {**wanted, "ignore_eos": True, "logprobs": 0, "detokenize": True}.items()
    assert "seed" not in found


def output(tokens: list[int], **changes: Any) -> Any:
    logprobs = [{token: SimpleNamespace(logprob=-token / 10)} for token in tokens]
    usual = {"token_ids": tokens, "logprobs": logprobs, "finish_reason": None, "weight_versions": None}
    return SimpleNamespace(**{**usual, **changes})


def test_tokens_come_with_the_log_probabilities_of_what_was_drawn() -> None:
    piece = output_to_chunk(output([3, 5]))
    assert (piece.tokens, piece.logps, piece.finish, piece.labels) == ([3, 5], [-0.3, -0.5], None, [])
    spans = [SimpleNamespace(version="4", start=0, end=1)]
    last = output_to_chunk(output([7], finish_reason="stop", weight_versions=spans))
    assert (last.finish, last.labels) == (FinishReason.STOP, ["4"])
    ended = output_to_chunk(output([], logprobs=None, finish_reason="abort"))
    assert (ended.tokens, ended.logps, ended.finish) == ([], [], FinishReason.ABORTED)


@pytest.mark.parametrize("changes", [{"logprobs": []}, {"logprobs": None}, {"finish_reason": "error"}])
def test_what_nobody_can_use_is_no_piece(changes: dict[str, Any]) -> None:
    with pytest.raises(BackendLost):
        output_to_chunk(output([3], **changes))
