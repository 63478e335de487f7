"""What the children of the contract suites serve: small models."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from headway.algorithms.advantages import AdvantageSettings
from headway.engines.native.native_engine import NativeEngine
from headway.engines.native.settings import NativeSettings
from headway.trainers.local.local_trainer import LocalTrainer
from headway.trainers.local.policy_scorer import PolicyScorer
from headway.trainers.local.settings import LocalSettings, OptimizerSettings
from headway.weights.shared_memory import PayloadReader
from headway.weights.weight_receiver import DoubleBufferedReceiver
from headway.weights.weight_store import SharedArena, WeightStore

from ..engines import factory as engines
from ..trainers import factory as trainers


def counting_engine(args: Mapping[str, Any]) -> NativeEngine:
    def runner(*parts: Any) -> engines.SlowRunner:
        made = engines.SlowRunner(*parts)
        made.step_s = args["step_s"]
        return made

    return NativeEngine(
        args["name"],
        engines.counting_model,
        NativeSettings(slots=4, slot_tokens=128, prefill_tokens=16, stream_tokens=4),
        eos=args["eos"],
        make_runner=runner,
        open_payload=PayloadReader().open,
    )


def tiny_engine(args: Mapping[str, Any]) -> NativeEngine:
    settings = NativeSettings(slots=4, slot_tokens=128, prefill_tokens=16, stream_tokens=4)
    return NativeEngine(args["name"], trainers.tiny, settings, eos=[], open_payload=PayloadReader().open)


def tiny_trainer(args: Mapping[str, Any]) -> LocalTrainer:
    settings = LocalSettings(
        advantages=AdvantageSettings(adv_estimator="grpo"),
        optimizer=OptimizerSettings(learning_rate=1e-2),
        micro_batch_tokens=64,
        reference=True,
    )
    store = WeightStore(bucket_mb=0.01, wire_dtype=None, arena=SharedArena())
    return LocalTrainer(trainers.tiny, settings, store)


def replica(args: Mapping[str, Any]) -> PolicyScorer:
    return PolicyScorer(
        trainers.tiny(), LocalSettings(), receiver=lambda switch: DoubleBufferedReceiver(switch, dtype=torch.float32)
    )
