"""The parts of a run that makes pictures: model, trainer and engines, in this process or in children.

The same functions as in `backends`, for a flow model instead of a language model; everything that is not named here
(scheduler, buffer, ledger, weights, staleness, resume) does not know the difference. A prompt is its text in UTF-8.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from headway.build.backends import Machinery, Policy, Served
from headway.build.parts import PartArgs, args_of, engine_slots, own_store
from headway.build.placement import Device, Placement
from headway.build.transfer import EngineEnd, make_store, make_transport, source_of, store_of
from headway.build.ways import Route
from headway.cluster.base import ChildSpec
from headway.config import Resolved
from headway.data import Sources
from headway.engines.base import Engine
from headway.engines.remote import RemoteEngine
from headway.errors import ConfigError
from headway.trainers.base import Trainer
from headway.trainers.remote import RemoteTrainer

if TYPE_CHECKING:
    from headway.generative.engine import FlowEngine
    from headway.generative.settings import FlowSettings
    from headway.generative.trainer import FlowTrainer
    from headway.generative.training import FlowTraining
    from headway.weights.store import WeightStore

_TYPES: Mapping[str, Literal["float32", "bfloat16", "float16"]] = {
    "bf16": "bfloat16",
    "fp16": "float16",
    "fp32": "float32",
}


class Utf8:
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


def find_policy(resolved: Resolved) -> Policy:
    """Find the model and read as much of it as the controller needs. Raises `ConfigError`."""
    from headway.generative.models import is_sd3, is_small_mmdit
    from headway.generative.pretrained import shipped, shipped_names

    wanted = resolved.config.actor_train.model_args.model_name_or_path or resolved.config.pretrain or ""
    path = shipped(wanted) if wanted in shipped_names() else Path(wanted).expanduser()
    if not path.is_dir():
        hint = f"a directory, or one of {', '.join(shipped_names())}"
        raise ConfigError("there is no such directory", key="pretrain", value=wanted, hint=hint)
    if not (is_small_mmdit(path) or is_sd3(path)):
        hint = "without `flow` it is taken for a language model"
        raise ConfigError("holds no flow model, but `flow` is given", key="pretrain", value=wanted, hint=hint)
    weights = path / "transformer" if (path / "transformer").is_dir() else path
    return Policy(path=path.resolve(), critic=None, tokenizer=Utf8(), parameters=_count(weights), positions=None)


def check_sources(policy: Policy, sources: Sources) -> None:
    """Raises `ConfigError` for the first prompt that the model cannot read."""
    check = prompt_check(policy.path)
    for source in filter(None, (sources.train, sources.validation)):
        for position in range(len(source)):
            task = source.task(position)
            if task is not None:
                check(bytes(task.prompt).decode())


def prompt_check(path: Path) -> Callable[[str], object]:
    """Raises `ConfigError` for a prompt that the model in `path` cannot read."""
    from headway.generative.models import is_small_mmdit
    from headway.generative.models.storage import read_config

    return read_config(path).tokens if is_small_mmdit(path) else lambda prompt: None


def make_machinery(resolved: Resolved, policy: Policy, place: Placement, logs: Path | None) -> Machinery:
    """Trainer and engines, where the placement wants them."""
    part = _part(resolved, policy, place, place.train_threads)
    engines = _engines(resolved, policy, place, logs)
    if place.processes:
        trainer: Trainer = RemoteTrainer(_spec("trainer", "trainer", part, place, logs), place.start)
    else:
        trainer = make_trainer(part, own_store(resolved, place.device, policy.parameters))
    transport = make_transport(resolved, place.route)
    return Machinery(trainer=trainer, engines=engines, transport=transport, cluster=place.cluster)


def make_served(resolved: Resolved, policy: Policy, place: Placement, logs: Path | None) -> Served:
    """Engines, and the policy's weights as something to load from."""
    from headway.generative.models import open_denoiser

    place = place.without_trainer()
    shared = place.processes and place.cluster is None
    store = make_store(resolved, place.device, place.route) if shared else store_of(resolved, place.device, None)
    model = open_denoiser(policy.path)
    store.publish(0, dict(model.state_dict()))
    return Served(
        engines=_engines(resolved, policy, place, logs),
        transport=make_transport(resolved, place.route),
        source=store,
        release=store.close,
        cluster=place.cluster,
    )


def make_trainer(args: PartArgs, store: WeightStore) -> FlowTrainer:
    """The policy being trained, publishing into `store`."""
    from headway.algorithms import kl_controller
    from headway.generative.trainer import FlowTrainer

    resolved = args.resolved()
    training = training_of(resolved, device=args.device, threads=args.threads)
    return FlowTrainer(
        _opener(args),
        _with_usual_targets(training, Path(args.model)),
        store,
        make_kl=lambda: kl_controller(resolved.config),
    )


def make_engine(args: PartArgs, name: str, *, read: Callable[[Any], Any] | None = None) -> FlowEngine:
    """One replica; its weights arrive later. `read` opens the payloads of buckets."""
    from headway.engines.native import NativeSettings
    from headway.generative.engine import FlowEngine

    resolved = args.resolved()
    settings = NativeSettings(
        slots=engine_slots(resolved, args.device),
        threads=args.threads,
        seed=resolved.config.seed,
        device=args.device,
        dtype="float32" if args.device == "cpu" else _TYPES[resolved.config.actor_infer.model_args.dtype],
    )
    check = prompt_check(Path(args.model))
    return FlowEngine(name, _opener(args), flow_settings_of(resolved), settings, check=check, read=read)


def flow_settings_of(resolved: Resolved) -> FlowSettings:
    """What engine and trainer agree on."""
    from headway.generative.settings import FlowSettings

    config = resolved.config
    flow = config.flow
    assert flow is not None
    return FlowSettings(
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


def training_of(resolved: Resolved, *, device: Device, threads: int) -> FlowTraining:
    """How the trainer learns."""
    from headway.algorithms.flow import NftParams
    from headway.generative.training import FlowTraining
    from headway.trainers.local import local_settings_of

    config = resolved.config
    flow = config.flow
    assert flow is not None
    half = device == "cuda" and config.actor_train.model_args.dtype == "bf16"
    local = local_settings_of(resolved, precision="bf16" if half else "fp32", device=device, threads=threads)
    kl_coef = config.kl_loss_coef if config.use_kl_loss else None
    nft = NftParams(beta=flow.nft_beta, clip=config.advantage_clip or 5.0, kl_coef=kl_coef or 0.0)
    return FlowTraining(
        local=replace(local, objective=replace(local.objective, kl_coef=None)),
        flow=flow_settings_of(resolved),
        micro_batch_samples=config.actor_train.training_args.per_device_train_batch_size,
        kl_coef=kl_coef,
        kl_mode=flow.kl_mode,
        nft=nft if flow.algorithm == "diffusion_nft" else None,
        nft_levels=flow.nft_levels,
        seed=config.seed,
    )


def _with_usual_targets(training: FlowTraining, path: Path) -> FlowTraining:
    """Where nothing says which layers get adapters: those that Flow-GRPO adapts in Stable Diffusion, else all."""
    from headway.generative.models import LORA_TARGETS, is_sd3

    lora = training.local.lora
    if lora is None or lora.targets or not is_sd3(path):
        return training
    return replace(training, local=replace(training.local, lora=replace(lora, targets=LORA_TARGETS)))


# -- targets of child processes


def trainer(args: Mapping[str, Any]) -> FlowTrainer:
    """The trainer; versions are published for other processes."""
    part, route = PartArgs.from_json(args["part"]), Route(**args["route"])
    resolved = part.resolved()
    made = make_trainer(part, make_store(resolved, part.device, route))
    made.source = source_of(made.source, resolved, route)
    return made


async def engine(args: Mapping[str, Any]) -> FlowEngine:
    """One replica; its model is built before the parent goes on."""
    part = PartArgs.from_json(args["part"])
    read = EngineEnd.of(Route(**args["route"]), args["name"], part.device).read
    made = make_engine(part, args["name"], read=read)
    await made.restart()
    return made


# -- inside


def _count(directory: Path) -> int:
    """Numbers in the weights of a directory; reads none of them."""
    from math import prod

    from safetensors import safe_open

    found = 0
    for file in sorted(directory.glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            found += sum(prod(tensors.get_slice(name).get_shape()) for name in tensors.keys())  # noqa: SIM118
    return found


def _opener(args: PartArgs) -> Callable[[], Any]:
    flow = args.resolved().config.flow
    assert flow is not None
    height, width = flow.height, flow.width

    def opened() -> Any:
        from headway.generative.models import open_denoiser

        return open_denoiser(Path(args.model), height=height, width=width)

    return opened


def _engines(resolved: Resolved, policy: Policy, place: Placement, logs: Path | None) -> list[Engine]:
    return [make_own_engine(resolved, policy, place, logs, f"engine/{n}") for n in range(place.replicas)]


def make_own_engine(resolved: Resolved, policy: Policy, place: Placement, logs: Path | None, name: str) -> Engine:
    """One engine of ours, where the placement wants it."""
    part = _part(resolved, policy, place, place.infer_threads)
    if not place.processes:
        return make_engine(part, name)
    return RemoteEngine(_spec(name, "engine", part, place, logs), engine_slots(resolved, place.device), place.start)


def _part(resolved: Resolved, policy: Policy, place: Placement, threads: int) -> PartArgs:
    return args_of(resolved, model=str(policy.path), critic=None, device=place.device, threads=threads)


def _spec(name: str, target: str, part: PartArgs, place: Placement, logs: Path | None) -> ChildSpec:
    return ChildSpec(
        name=name,
        target=f"headway.build.images:{target}",
        args={"part": part.to_json(), "name": name, "route": place.route.to_json()},
        threads=part.threads,
        log=None if logs is None else logs / f"{name.replace('/', '-')}.log",
    )
