"""What the ranks of the tests are: a small trainer of denoising models, whole and cut."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headway.algorithms.diffusion_nft import DiffusionNftParams
from headway.denoising.denoising_trainer import DenoisingTrainer
from headway.denoising.settings import DenoisingSettings, DenoisingTrainerSettings
from headway.denoising.sharded_denoising import DenoisingRankTrainer, ShardedDenoisingRanks
from headway.trainers.local.settings import LoraSettings
from headway.trainers.sharded.rank_host import RankSpec
from headway.trainers.sharded.rank_layout import RankLayout
from headway.trainers.sharded.sharded_trainer import ShardedRankGroup
from headway.weights.weight_store import NonPublishingStore, SharedArena, WeightStore

from .factory import local, make_model


def settings_of(args: Mapping[str, Any]) -> DenoisingTrainerSettings:
    nft = args.get("nft", False)
    lora = {"lora": LoraSettings(rank=2, alpha=4.0)} if args.get("lora") else {}
    return DenoisingTrainerSettings(
        local=local(mini_batch_samples=args.get("mini"), proximal=args.get("proximal", False), **lora),
        denoising=DenoisingSettings(window="last" if nft else "random", guidance=args.get("guidance", 1.0)),
        micro_batch_samples=args.get("micro", 3),
        kl_coef=args.get("kl"),
        nft=DiffusionNftParams(kl_coef=args.get("kl") or 0.0) if nft else None,
    )


def whole(args: Mapping[str, Any]) -> DenoisingTrainer:
    return DenoisingTrainer(make_model, settings_of(args), make_store())


def rank(args: Mapping[str, Any]) -> RankSpec:
    def make() -> DenoisingRankTrainer:
        ranks = ShardedDenoisingRanks(ShardedRankGroup(RankLayout(ranks=args["ranks"]), "cpu"))
        store = make_store() if ranks.is_first else NonPublishingStore(None)
        return DenoisingRankTrainer(make_model, settings_of(args), store, ranks=ranks)

    return RankSpec(number=args["rank"], ranks=args["ranks"], device="cpu", make=make)


def make_store() -> WeightStore:
    return WeightStore(bucket_mb=0.01, wire_dtype=None, arena=SharedArena())
