"""Reward models of a run: each in processes of its own, one for each of its devices, served by `rewards`' clients.

A sequence-classification model runs as `transformers` has it. A judge is served by our engine, or by vLLM under an
interpreter that has it. `create_*` functions are the targets of child processes.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headway.config import ResolvedConfig, RewardConfig
from headway.config.reward_model_choice import CLASSIFIER, get_reward_function, list_served_rewards
from headway.errors import ConfigError, EngineCrashed, EngineError, RewardError
from headway.launch.components import ComponentArgs, LaunchContext, read_child_args
from headway.launch.in_process_engines import exit_soon, make_llm
from headway.launch.inference_servers import TORCH_DTYPES, estimate_kv_cache_bytes
from headway.placement.machine import make_visible_gpus_env
from headway.placement.memory_model import JUDGE_PROMPT_TOKENS
from headway.placement.placement import Placement
from headway.processes.base import ChildSpec, StartPeer
from headway.processes.child_process import ChildProcess, spawn_with_interpreter
from headway.rewards.base import Reward
from headway.rewards.judge_rewards import ServedJudgeReward
from headway.rewards.model_reward import ModelReward
from headway.rewards.reward_model_client import RewardModelClient
from headway.rewards.reward_registry import RoutedReward
from headway.types import SamplingParams

if TYPE_CHECKING:
    from headway.engines.native.native_engine import NativeEngine
    from headway.engines.vllm.vllm_core import AsyncLlmCore
    from headway.models.sequence_classifier import SequenceClassifier

_BATCH_TOKENS = {"cpu": 4096, "cuda": 65536}
"""Tokens of one forward pass of a classifier, with padding."""
_LONGEST_CONTEXT = 32768
_VLLM_START_S = 600.0
_BUCKET_MB = 256.0


def check_reward_models(resolved: ResolvedConfig) -> None:
    """Check that each reward's model is there and of the right kind; nothing is loaded. Raises `ConfigError`."""
    for name in list_served_rewards(resolved.config):
        reward = resolved.config.rewards[name]
        try:
            _check_reward_model(name, reward)
        except ConfigError as error:
            raise ConfigError(f"rewards.{name}{'.' if error.key else ': '}{error}") from error


def _check_reward_model(name: str, reward: RewardConfig) -> None:
    from headway.models.model_checks import check_attention
    from headway.models.model_loading import load_tokenizer, make_architecture_factory

    path = find_reward_model(reward)
    if get_reward_function(name, reward) == CLASSIFIER:
        from headway.models.sequence_classifier import find_classifier_head

        find_classifier_head(path)
        return
    if load_tokenizer(path).chat_template is None:
        hint = "a model that was trained to answer"
        raise ConfigError("has no chat template to ask it by", key="model_args", value=str(path), hint=hint)
    if reward.strategy_args.strategy_name != "vllm":
        check_attention(make_architecture_factory(path)())


def find_reward_model(reward: RewardConfig) -> Path:
    """Return the directory of a reward's model; fetch or convert it where needed. Raises `ConfigError`."""
    from headway.models.model_names import resolve_model

    return resolve_model(reward.model_args.model_name_or_path or "")


def connect_reward_models(reward: Reward, context: LaunchContext, report: Callable[[str, str], None]) -> None:
    """Give every reward that has a model a client for it; nothing is started yet.

    `report` gets the name of a process and why it is down, or an empty reason when it is up again.
    """
    for name, model in (reward.models if isinstance(reward, RoutedReward) else {}).items():
        model.client = _make_client(name, model, context, report)


def _make_client(
    name: str, model: ModelReward | ServedJudgeReward, context: LaunchContext, report: Callable[[str, str], None]
) -> RewardModelClient:
    config, placement = context.resolved.config, context.placement
    reward, start = config.rewards[name], placement.start_child
    target: Callable[..., Any] = create_classifier if isinstance(model, ModelReward) else create_judge
    if context.resolved.derived.strategies[f"rewards.{name}"] == "vllm":
        target, start = create_vllm_judge, _start_with_vllm(reward)
    path, names = find_reward_model(reward), placement.list_reward_components(name)
    options = {"reward": name, "path": str(path), "slots": model.concurrency}
    if isinstance(model, ServedJudgeReward):
        options |= {"context_tokens": _choose_context_tokens(context.resolved, path, model.max_tokens)}
    specs = [_make_spec(context, one, target, reward, options) for one in names]
    if target is create_vllm_judge:
        specs = [_add_vllm_launch(spec, reward, placement) for spec in specs]
    return RewardModelClient(
        specs=specs,
        start_child=start,
        width=model.concurrency * len(names),
        timeout_s=config.reliability.reward_timeout_s,
        backoff_s=config.reliability.restart_backoff_s,
        report=report,
    )


def _make_spec(
    context: LaunchContext, name: str, target: Callable[..., Any], reward: RewardConfig, options: Mapping[str, Any]
) -> ChildSpec:
    threads = reward.strategy_args.strategy_config.num_threads or context.placement.infer_threads
    spec = context.make_child_spec(name, target, threads)
    return replace(spec, args={**spec.args, **options})


def _add_vllm_launch(spec: ChildSpec, reward: RewardConfig, placement: Placement) -> ChildSpec:
    """Add what vLLM is started with, in the process of a judge."""
    from headway.engines.servers.server_process import LaunchSettings, make_vllm_environment

    options, on_cpu, args = reward.strategy_args.strategy_config, placement.device == "cpu", spec.args
    slots, tokens = args["slots"], args["context_tokens"]
    launch = LaunchSettings(
        model=args["path"],
        port=0,
        slots=slots,
        context_tokens=tokens,
        dtype="float32" if on_cpu else TORCH_DTYPES[reward.model_args.dtype],
        tensor_parallel=options.tensor_model_parallel_size,
        memory_share=options.gpu_memory_utilization,
        cache_bytes=estimate_kv_cache_bytes(Path(args["path"]), slots, tokens) if on_cpu else 0,
        threads=(spec.threads or 1) if on_cpu else 0,
        extra=options.server_args,
    )
    env = {**spec.env, **make_vllm_environment(launch), "VLLM_WORKER_MULTIPROC_METHOD": "spawn"}
    if spec.name in placement.gpus:
        env |= make_visible_gpus_env(placement.places[spec.name].cards)
    return replace(spec, args={**args, "launch": {**asdict(launch), "extra": dict(launch.extra)}}, env=env)


def _start_with_vllm(reward: RewardConfig) -> StartPeer:
    python = reward.strategy_args.strategy_config.server_python
    spawn = None if python is None else spawn_with_interpreter(python)
    return partial(ChildProcess.start, timeout_s=_VLLM_START_S, spawn=spawn)


def _choose_context_tokens(resolved: ResolvedConfig, path: Path, answer_tokens: int) -> int:
    """Return the tokens of a judge's longest request: its tokenizer may need twice those of the policy."""
    from headway.models.model_loading import max_sequence_length

    wanted = 2 * resolved.derived.sequence_length + JUDGE_PROMPT_TOKENS + answer_tokens
    return min(wanted, max_sequence_length(path) or _LONGEST_CONTEXT)


# -- targets of child processes


def create_classifier(args: Mapping[str, Any]) -> SequenceClassifier:
    """Load a sequence-classification model on the device of this process."""
    import torch

    from headway.models.sequence_classifier import SequenceClassifier

    component, reward = _read_reward_args(args)
    dtype = torch.float32 if component.device == "cpu" else getattr(torch, TORCH_DTYPES[reward.model_args.dtype])
    tokens = _BATCH_TOKENS[component.device]
    return SequenceClassifier.load(args["path"], dtype=dtype, device=component.device, batch_tokens=tokens)


def _read_reward_args(args: Mapping[str, Any]) -> tuple[ComponentArgs, RewardConfig]:
    component, _ = read_child_args(args)
    return component, component.load_config().config.rewards[args["reward"]]


async def create_judge(args: Mapping[str, Any]) -> JudgeModel:
    """Start our engine with a judge's weights."""
    import torch

    from headway.engines.native.native_engine import NativeEngine
    from headway.engines.native.settings import NativeSettings
    from headway.models.model_loading import find_end_tokens, load_model, load_tokenizer, make_architecture_factory

    (component, reward), path = _read_reward_args(args), args["path"]
    dtype = "float32" if component.device == "cpu" else TORCH_DTYPES[reward.model_args.dtype]
    engine = NativeEngine(
        args["name"],
        make_architecture_factory(path),
        NativeSettings(
            slots=args["slots"],
            slot_tokens=args["context_tokens"],
            kv_cache_bytes=component.kv_cache_bytes,
            spare_weights=False,
            threads=component.threads,
            seed=component.load_config().config.seed,
            device=component.device,
            dtype=dtype,
        ),
        eos=find_end_tokens(path),
    )
    await engine.restart()
    await _load_weights(engine, load_model(path, getattr(torch, dtype)))
    return JudgeModel(partial(_generate, engine), load_tokenizer(path), engine.close)


async def _load_weights(engine: NativeEngine, model: Any) -> None:
    """Give the weights of `model` to an engine, the way that a trainer's weights would go."""
    from headway.weights.weight_store import WeightStore

    store = WeightStore(bucket_mb=_BUCKET_MB, wire_dtype=model.dtype)
    try:
        store.publish(0, dict(model.named_parameters()))
        manifest, buckets = await store.gather(0)
        await engine.receiver.begin(manifest)
        async for bucket in buckets:
            await engine.receiver.load(bucket)
        await engine.receiver.flip()
    finally:
        store.close()


async def create_vllm_judge(args: Mapping[str, Any]) -> JudgeModel:
    """Start vLLM with a judge's weights in this process."""
    from headway.models.model_loading import find_end_tokens, load_tokenizer
    from headway.processes.parent_watchdog import tie_process_group_to_parent

    tie_process_group_to_parent()
    core, path = make_llm(args), args["path"]
    return JudgeModel(partial(_generate_with_vllm, core, find_end_tokens(path)), load_tokenizer(path), core.close)


Generate = Callable[[str, Sequence[int], SamplingParams], Awaitable[Sequence[int]]]
"""Returns the tokens that answer a prompt; the first argument names the request."""


class JudgeModel:
    """Answers prompts with a model, through its chat template."""

    def __init__(self, generate: Generate, tokenizer: Any, close: Callable[[], Awaitable[None]]) -> None:
        self._generate, self._tokenizer, self._close, self._numbers = generate, tokenizer, close, count()

    async def complete(self, prompt: str, max_tokens: int, sampling: Mapping[str, Any]) -> str:
        """Return the answer to `prompt`. Raises `RewardError` if the model cannot take it."""
        messages, params = [{"role": "user", "content": prompt}], SamplingParams(max_new_tokens=max_tokens, **sampling)
        try:
            text = self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
            tokens = [int(one) for one in self._tokenizer.encode(text, add_special_tokens=False)]
            answer = await self._generate(f"judge-{next(self._numbers):09}", tokens, params)
        except EngineError as error:
            raise RewardError(str(error)) from error
        except EngineCrashed as error:
            exit_soon(str(error))  # without its engine this process is useless; it is restarted at once
            raise
        return str(self._tokenizer.decode(list(answer), skip_special_tokens=True))

    async def close(self) -> None:
        await self._close()


async def _generate(engine: NativeEngine, name: str, prompt: Sequence[int], params: SamplingParams) -> Sequence[int]:
    from headway.engines.base import Progress, Request

    progress = Progress()
    await engine.generate(Request(request_id=name, session=name, prompt=prompt, params=params), progress)
    return progress.actions


async def _generate_with_vllm(
    core: AsyncLlmCore, ends: frozenset[int], name: str, prompt: Sequence[int], params: SamplingParams
) -> Sequence[int]:
    from headway.engines.streaming_engine import BackendLost, StreamRequest

    request = StreamRequest(
        key=name, prompt=prompt, max_tokens=params.max_new_tokens, params=params, end_tokens=sorted(ends), label=""
    )
    try:
        return [token async for chunk in await core.add(request) for token in chunk.tokens]
    except BackendLost as error:
        raise EngineCrashed(str(error)) from error
