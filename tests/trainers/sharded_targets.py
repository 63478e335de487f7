"""What the ranks of the tests are: small trainers, whole and cut."""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping
from dataclasses import replace
from functools import partial, reduce
from pathlib import Path
from typing import Any

import torch

from headway.algorithms.advantages import AdvantageSettings
from headway.errors import ConfigError, TrainerError
from headway.trainers.local.local_trainer import LocalTrainer
from headway.trainers.local.settings import LocalSettings, LoraSettings, OptimizerSettings
from headway.trainers.sharded.rank_host import RankSpec
from headway.trainers.sharded.rank_layout import RankLayout
from headway.trainers.sharded.sharded_trainer import RankTrainer, ShardedRankGroup
from headway.types import Batch
from headway.weights.weight_store import NonPublishingStore, ObjectArena, SharedArena, WeightStore

from .factory import VOCABULARY, tiny


def qwen3(*, seed: int = 0) -> Any:
    """With norms of queries and keys, untied, with a bias nowhere."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(seed)
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=VOCABULARY,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
            max_position_embeddings=256,
            tie_word_embeddings=False,
        )
    )
    with torch.no_grad():
        for name, one in model.named_parameters():
            if name.endswith("norm.weight"):
                one.uniform_(0.5, 1.5)
    return model


def mixture(*, seed: int = 0) -> Any:
    """A mixture of four experts, two for each token."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(seed)
    config = Qwen3MoeConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        moe_intermediate_size=16,
        num_experts=4,
        num_experts_per_tok=2,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=256,
    )
    return Qwen3MoeForCausalLM(config)


MODELS = {"llama": tiny, "qwen3": qwen3, "mixture": mixture}


def settings_of(args: Mapping[str, Any]) -> LocalSettings:
    lora = {"lora": LoraSettings(rank=2, alpha=4.0)} if args.get("lora") else {}
    return LocalSettings(
        advantages=AdvantageSettings(adv_estimator="gae" if args.get("critic") else "grpo"),
        optimizer=OptimizerSettings(learning_rate=1e-2, weight_decay=0.1),
        micro_batch_tokens=args.get("tokens", 64),
        reference=args.get("reference", False),
        gradient_checkpointing=args.get("checkpointing", False),
        mini_batch_samples=args.get("mini"),
        critic=OptimizerSettings(learning_rate=1e-2) if args.get("critic") else None,
        precision=args.get("precision", "fp64"),
        device=args.get("device", "cpu"),
        **lora,
    )


def store(args: Mapping[str, Any]) -> WeightStore:
    arena: Any = ObjectArena() if args.get("objects") else SharedArena()
    return WeightStore(bucket_mb=0.01, wire_dtype=None, arena=arena)


def whole(args: Mapping[str, Any]) -> LocalTrainer:
    return LocalTrainer(MODELS[args.get("model", "llama")], settings_of(args), store({}))


def rank(args: Mapping[str, Any], kind: type[RankTrainer] = RankTrainer) -> RankSpec:
    device = args.get("device", "cpu")

    def make() -> RankTrainer:
        ranks = ShardedRankGroup(
            RankLayout(ranks=args["ranks"], tensor=args.get("tensor", 1), context=args.get("context", 1)), device
        )
        model = partial(MODELS[args.get("model", "llama")])
        return kind(model, settings_of(args), store(args) if ranks.is_first else NonPublishingStore(None), ranks=ranks)

    return RankSpec(number=args["rank"], ranks=args["ranks"], device=device, make=make, backend=args.get("backend", ""))


class _Unlucky(RankTrainer):
    async def train(self, batch: Batch) -> Mapping[str, float]:
        if self._ranks.is_first:
            return await super().train(batch)
        raise TrainerError("not enough memory")


def failing(args: Mapping[str, Any]) -> RankSpec:
    """The others wait for rank 1 in the middle of a step."""
    return rank(args, _Unlucky)


def refusing(args: Mapping[str, Any]) -> RankSpec:
    """The others wait for rank 1 before there is anything to do."""
    if args["rank"] == 1:
        raise ConfigError("rank 1 does not like it", key="rank", value=1)
    return rank(args)


def _refuses() -> RankTrainer:
    raise ConfigError("rank 1 does not like it", key="rank", value=1)


def regretting(args: Mapping[str, Any]) -> RankSpec:
    """The same when they have met: the others wait for rank 1 with their model in hand."""
    made = rank(args)
    return replace(made, make=_refuses) if made.number == 1 else made


def missing(args: Mapping[str, Any]) -> RankSpec:
    """There is one rank more than come."""
    made = rank(args)
    return replace(made, ranks=made.ranks + 1)


def signalled(args: Mapping[str, Any]) -> RankSpec:
    """Rank `victim` sends itself a signal when it first comes to `where`, or at once; a file remembers that it did."""
    mark = Path(args["mark"])

    def signal_once() -> None:
        if not mark.exists():
            mark.touch()
            os.kill(os.getpid(), args["signal"])

    if args["rank"] == args["victim"] and not args["where"]:
        signal_once()
    elif args["rank"] == args["victim"]:
        module, _, path = args["where"].partition(":")
        *owners, name = path.split(".")
        owner = reduce(getattr, owners, importlib.import_module(module))
        called = getattr(owner, name)

        def call(*given: Any, **named: Any) -> Any:
            signal_once()
            return called(*given, **named)

        setattr(owner, name, call)
    return rank(args)
