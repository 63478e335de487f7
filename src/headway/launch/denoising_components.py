"""The parts of a run that makes pictures: model, trainer and engines, in this process or in children.

The same functions as in `backends`, for a flow model instead of a language model; everything that is not named here
(scheduler, buffer, ledger, weights, staleness, resume) does not know the difference. A prompt is its text in UTF-8.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from headway.config import ResolvedConfig
from headway.data import DataSources
from headway.engines.base import Engine
from headway.engines.remote_engine import RemoteEngine
from headway.errors import ConfigError
from headway.launch.components import (
    ComponentArgs,
    count_engine_slots,
    make_component_args,
    make_local_store,
)
from headway.launch.language_components import InferenceComponents, PolicyInfo, TrainingComponents
from headway.launch.placement import Device, Placement
from headway.launch.transports import (
    ReceiverEnd,
    TransportPlan,
    make_published_store,
    make_transport,
    make_weight_store,
    wrap_weight_source,
)
from headway.processes.base import ChildSpec
from headway.trainers.base import Trainer
from headway.trainers.remote_trainer import RemoteTrainer

if TYPE_CHECKING:
    from headway.denoising.denoising_engine import DenoisingEngine
    from headway.denoising.denoising_trainer import DenoisingTrainer
    from headway.denoising.settings import DenoisingSettings, DenoisingTrainerSettings
    from headway.weights.weight_store import WeightStore

_GPU_DTYPES: Mapping[str, Literal["float32", "bfloat16", "float16"]] = {
    "bf16": "bfloat16",
    "fp16": "float16",
    "fp32": "float32",
}


class Utf8PromptTokenizer:
    """Prompts of flow models: their text, byte by byte."""

    def apply_chat_template(
        self, conversation: list[Any], *, tokenize: bool, add_generation_prompt: bool, **variables: Any
    ) -> str:
        """The one message there can be."""
        if variables:
            raise ValueError("a picture has a prompt, and no template that reads variables")
        if len(conversation) != 1:
            raise ValueError(f"a picture has a prompt, not a conversation of {len(conversation)} messages")
        return str(conversation[0]["content"])

    def encode(self, text: str, *, add_special_tokens: bool) -> Sequence[int]:
        """As it is."""
        return tuple(text.encode())

    def decode(self, actions: Sequence[Any], **_: Any) -> str:
        """Denoising steps say nothing."""
        return ""


def find_policy(resolved: ResolvedConfig) -> PolicyInfo:
    """Find the model and read as much of it as the controller needs. Raises `ConfigError`."""
    from headway.denoising.models import is_sd3, is_small_mmdit
    from headway.denoising.shipped_models import find_shipped_model, list_shipped_models

    wanted = resolved.config.actor_train.model_args.model_name_or_path or resolved.config.pretrain or ""
    path = find_shipped_model(wanted) if wanted in list_shipped_models() else Path(wanted).expanduser()
    if not path.is_dir():
        hint = f"a directory, or one of {', '.join(list_shipped_models())}"
        raise ConfigError("there is no such directory", key="pretrain", value=wanted, hint=hint)
    if not (is_small_mmdit(path) or is_sd3(path)):
        hint = "without `denoising` it is taken for a language model"
        raise ConfigError("holds no denoising model, but `denoising` is given", key="pretrain", value=wanted, hint=hint)
    weights = path / "transformer" if (path / "transformer").is_dir() else path
    return PolicyInfo(
        path=path.resolve(),
        critic=None,
        tokenizer=Utf8PromptTokenizer(),
        parameters=_count_parameters(weights),
        positions=None,
    )


def check_prompts(policy: PolicyInfo, sources: DataSources) -> None:
    """Raises `ConfigError` for the first prompt that the model cannot read."""
    check = make_prompt_check(policy.path)
    for source in filter(None, (sources.train, sources.validation)):
        for position in range(len(source)):
            task = source.task(position)
            if task is not None:
                check(bytes(task.prompt).decode())


def make_prompt_check(path: Path) -> Callable[[str], object]:
    """Raises `ConfigError` for a prompt that the model in `path` cannot read."""
    from headway.denoising.models import is_small_mmdit
    from headway.denoising.models.mmdit_config import read_mmdit_config

    return read_mmdit_config(path).tokenize if is_small_mmdit(path) else lambda prompt: None


def make_training_components(
    resolved: ResolvedConfig, policy: PolicyInfo, place: Placement, logs: Path | None
) -> TrainingComponents:
    """Trainer and engines, where the placement wants them."""
    part = _make_component_args(resolved, policy, place, place.train_threads)
    engines = _make_engines(resolved, policy, place, logs)
    if place.processes:
        trainer: Trainer = RemoteTrainer(_make_child_spec("trainer", "trainer", part, place, logs), place.start)
    else:
        trainer = make_denoising_trainer(part, make_local_store(resolved, place.device, policy.parameters))
    transport = make_transport(resolved, place.route)
    return TrainingComponents(trainer=trainer, engines=engines, transport=transport, cluster=place.cluster)


def make_inference_components(
    resolved: ResolvedConfig, policy: PolicyInfo, place: Placement, logs: Path | None
) -> InferenceComponents:
    """Engines, and the policy's weights as something to load from."""
    from headway.denoising.models import open_denoiser

    place = place.without_trainer()
    shared = place.processes and place.cluster is None
    store = (
        make_published_store(resolved, place.device, place.route)
        if shared
        else make_weight_store(resolved, place.device, None)
    )
    model = open_denoiser(policy.path)
    store.publish(0, dict(model.state_dict()))
    return InferenceComponents(
        engines=_make_engines(resolved, policy, place, logs),
        transport=make_transport(resolved, place.route),
        source=store,
        release=store.close,
        cluster=place.cluster,
    )


def make_denoising_trainer(args: ComponentArgs, store: WeightStore) -> DenoisingTrainer:
    """The policy being trained, publishing into `store`."""
    from headway.algorithms import make_kl_controller
    from headway.denoising.denoising_trainer import DenoisingTrainer

    resolved = args.resolved()
    training = make_denoising_training(resolved, device=args.device, threads=args.threads)
    return DenoisingTrainer(
        _make_denoiser_loader(args),
        _add_default_lora_targets(training, Path(args.model)),
        store,
        make_kl=lambda: make_kl_controller(resolved.config),
    )


def make_denoising_engine(
    args: ComponentArgs, name: str, *, read: Callable[[Any], Any] | None = None
) -> DenoisingEngine:
    """One replica; its weights arrive later. `read` opens the payloads of buckets."""
    from headway.denoising.denoising_engine import DenoisingEngine
    from headway.engines.native import NativeSettings

    resolved = args.resolved()
    settings = NativeSettings(
        slots=count_engine_slots(resolved, args.device),
        threads=args.threads,
        seed=resolved.config.seed,
        device=args.device,
        dtype="float32" if args.device == "cpu" else _GPU_DTYPES[resolved.config.actor_infer.model_args.dtype],
    )
    check = make_prompt_check(Path(args.model))
    return DenoisingEngine(
        name, _make_denoiser_loader(args), make_denoising_settings(resolved), settings, check=check, read=read
    )


def make_denoising_settings(resolved: ResolvedConfig) -> DenoisingSettings:
    """What engine and trainer agree on."""
    from headway.denoising.settings import DenoisingSettings

    config = resolved.config
    flow = config.denoising
    assert flow is not None
    return DenoisingSettings(
        sampler=flow.sampler,
        noise_level=flow.noise_level,
        shift=flow.timestep_shift,
        window="last" if flow.algorithm == "diffusion_nft" else flow.window,
        window_size=flow.window_size,
        window_interval=flow.window_interval,
        window_stride=flow.window_stride,
        share_prefix=flow.share_prefix,
        guidance=config.actor_infer.generating_args.guidance_scale,
        seed=config.seed,
    )


def make_denoising_training(resolved: ResolvedConfig, *, device: Device, threads: int) -> DenoisingTrainerSettings:
    """How the trainer learns."""
    from headway.algorithms.denoising import DiffusionNftParams
    from headway.denoising.settings import DenoisingTrainerSettings
    from headway.trainers.local import make_local_settings

    config = resolved.config
    flow = config.denoising
    assert flow is not None
    half = device == "cuda" and config.actor_train.model_args.dtype == "bf16"
    local = make_local_settings(resolved, precision="bf16" if half else "fp32", device=device, threads=threads)
    kl_coef = config.kl_loss_coef if config.use_kl_loss else None
    nft = DiffusionNftParams(beta=flow.nft_beta, clip=config.advantage_clip or 5.0, kl_coef=kl_coef or 0.0)
    return DenoisingTrainerSettings(
        local=replace(local, objective=replace(local.objective, kl_coef=None)),
        denoising=make_denoising_settings(resolved),
        micro_batch_samples=config.actor_train.training_args.per_device_train_batch_size,
        kl_coef=kl_coef,
        kl_mode=flow.kl_mode,
        nft=nft if flow.algorithm == "diffusion_nft" else None,
        nft_levels=flow.nft_levels,
        seed=config.seed,
    )


def _add_default_lora_targets(training: DenoisingTrainerSettings, path: Path) -> DenoisingTrainerSettings:
    """Where nothing says which layers get adapters: those that Flow-GRPO adapts in Stable Diffusion, else all."""
    from headway.denoising.models import SD3_LORA_TARGETS, is_sd3

    lora = training.local.lora
    if lora is None or lora.targets or not is_sd3(path):
        return training
    return replace(training, local=replace(training.local, lora=replace(lora, targets=SD3_LORA_TARGETS)))


# -- targets of child processes


def trainer(args: Mapping[str, Any]) -> DenoisingTrainer:
    """The trainer; versions are published for other processes."""
    part, route = ComponentArgs.from_json(args["part"]), TransportPlan(**args["route"])
    resolved = part.resolved()
    made = make_denoising_trainer(part, make_published_store(resolved, part.device, route))
    made.source = wrap_weight_source(made.source, resolved, route)
    return made


async def engine(args: Mapping[str, Any]) -> DenoisingEngine:
    """One replica; its model is built before the parent goes on."""
    part = ComponentArgs.from_json(args["part"])
    read = ReceiverEnd.of(TransportPlan(**args["route"]), args["name"], part.device).read
    made = make_denoising_engine(part, args["name"], read=read)
    await made.restart()
    return made


# -- inside


def _count_parameters(directory: Path) -> int:
    """Numbers in the weights of a directory; reads none of them."""
    from math import prod

    from safetensors import safe_open

    found = 0
    for file in sorted(directory.glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            found += sum(prod(tensors.get_slice(name).get_shape()) for name in tensors.keys())  # noqa: SIM118
    return found


def _make_denoiser_loader(args: ComponentArgs) -> Callable[[], Any]:
    flow = args.resolved().config.denoising
    assert flow is not None
    height, width = flow.height, flow.width

    def opened() -> Any:
        from headway.denoising.models import open_denoiser

        return open_denoiser(Path(args.model), height=height, width=width)

    return opened


def _make_engines(resolved: ResolvedConfig, policy: PolicyInfo, place: Placement, logs: Path | None) -> list[Engine]:
    return [make_engine_component(resolved, policy, place, logs, f"engine/{n}") for n in range(place.replicas)]


def make_engine_component(
    resolved: ResolvedConfig, policy: PolicyInfo, place: Placement, logs: Path | None, name: str
) -> Engine:
    """One engine of ours, where the placement wants it."""
    part = _make_component_args(resolved, policy, place, place.infer_threads)
    if not place.processes:
        return make_denoising_engine(part, name)
    return RemoteEngine(
        _make_child_spec(name, "engine", part, place, logs), count_engine_slots(resolved, place.device), place.start
    )


def _make_component_args(resolved: ResolvedConfig, policy: PolicyInfo, place: Placement, threads: int) -> ComponentArgs:
    return make_component_args(resolved, model=str(policy.path), critic=None, device=place.device, threads=threads)


def _make_child_spec(name: str, target: str, part: ComponentArgs, place: Placement, logs: Path | None) -> ChildSpec:
    return ChildSpec(
        name=name,
        target=f"headway.launch.denoising_components:{target}",
        args={"part": part.to_json(), "name": name, "route": place.route.to_json()},
        threads=part.threads,
        log=None if logs is None else logs / f"{name.replace('/', '-')}.log",
    )
