"""vLLM on the requests of `engine_gpu.py`, to be run right after it on the same card.

    python benchmarks/vllm_lengths.py --model 7B --lengths long --seconds 40
    python benchmarks/vllm_lengths.py --model 7B --lengths 64 256 512

Random weights of the same shapes, the same prompts and lengths, log-probabilities of what was drawn, no text, CUDA
graphs and prefix caching on. `long` is stopped by the clock, as there; tokens of answers that are not finished count.
Starting vLLM, its captures and one round of short answers count for nothing.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "1")

from engine_gpu import PROMPT, config_of, log_normal, requests


def start(name: str, longest: int, slots: int, **options: Any) -> Any:
    from vllm import LLM

    directory = tempfile.mkdtemp()
    config = config_of(name)
    config.architectures, config.eos_token_id, config.bos_token_id = ["Qwen2ForCausalLM"], 151645, 151643
    config.save_pretrained(directory)
    begin = time.perf_counter()
    found = LLM(
        model=directory,
        load_format="dummy",
        skip_tokenizer_init=True,
        dtype="bfloat16",
        enable_prefix_caching=True,
        max_model_len=longest,
        max_num_seqs=slots,
        seed=0,
        **options,
    )
    print(f"vLLM, {name}: started in {time.perf_counter() - begin:.0f} s", flush=True)
    return found


def answer(engine: Any, lengths: list[int], mark: str, seconds: float | None = None) -> tuple[int, float]:
    """Tokens made and seconds taken; all together, to their ends or to the clock."""
    from vllm.sampling_params import RequestOutputKind

    from vllm import SamplingParams

    inner = engine.llm_engine
    for each in requests(lengths, 150_000, mark):
        params = SamplingParams(
            temperature=1.0,
            max_tokens=each.params.max_new_tokens,
            ignore_eos=True,
            logprobs=0,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        inner.add_request(each.request_id, {"prompt_token_ids": list(each.prompt)}, params)
    made, begin = 0, time.perf_counter()
    while inner.has_unfinished_requests():
        for output in inner.step():
            made += len(output.outputs[0].token_ids)
        if seconds is not None and time.perf_counter() - begin > seconds:
            break
    took = time.perf_counter() - begin
    states = inner.output_processor.request_states
    made += sum(state.detokenizer.num_output_tokens() for state in states.values())
    if states:
        inner.abort_request(list(states), internal=True)
    return made, took


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="7B")
    parser.add_argument("--lengths", nargs="*", default=["long"], help="numbers of requests of 512 tokens; log; long")
    parser.add_argument("--seconds", type=float, help="stop `long` after so many seconds")
    parser.add_argument("--quantization", help="such as fp8")
    parser.add_argument("--kv-dtype", default="auto", help="of the KV cache, such as fp8")
    parser.add_argument("--memory", type=float, default=0.85, help="share of the card")
    parser.add_argument("--kv-gib", type=float, help="memory of the KV cache; for a card that others use meanwhile")
    parser.add_argument("--ready", help="make this file when vLLM has started")
    parser.add_argument("--after", help="wait for this file then, at most four minutes")
    options = parser.parse_args()
    longest = 32768 if "long" in options.lengths else 4096
    slots = 256 if options.lengths == ["long"] else 512
    engine = start(
        options.model,
        longest,
        slots,
        gpu_memory_utilization=options.memory,
        quantization=options.quantization,
        kv_cache_dtype=options.kv_dtype,
        kv_cache_memory_bytes=None if options.kv_gib is None else int(options.kv_gib * 2**30),
    )
    answer(engine, [64] * slots, "w")
    if options.ready:
        Path(options.ready).touch()
    for _ in range(2400 if options.after else 0):
        if Path(options.after).exists():
            break
        time.sleep(0.1)
    for chosen in options.lengths:
        lengths = (
            log_normal(256, 4096, 32768 - PROMPT)
            if chosen == "long"
            else log_normal()
            if chosen == "log"
            else [512] * int(chosen)
        )
        made, took = answer(engine, lengths, chosen, options.seconds if chosen == "long" else None)
        print(f"vLLM, {options.model}, {chosen}: {made:,} of {sum(lengths):,} tokens in {took:.1f} s", end=": ")
        print(f"{made / took:,.0f} tok/s", flush=True)


if __name__ == "__main__":
    main()
