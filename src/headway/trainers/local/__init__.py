"""A trainer in one process: any `transformers` decoder, full or by LoRA, with reference and critic.

    store = WeightStore(...)
    trainer = LocalTrainer(lambda: AutoModelForCausalLM.from_pretrained(path), local_settings_of(resolved), store)

`trainer` is the asynchronous face, `learner` everything behind it that a thread does. One step reads top down:
`tokens` (samples → arrays) → `packing` (arrays → trees without padding) → `model` (trees → log-probabilities)
→ `update` (losses → gradients → weights).
"""

from headway.trainers.local.local_scorers import LogpScorer, ReferenceScorer, ValueScorer
from headway.trainers.local.local_trainer import LocalTrainer
from headway.trainers.local.settings import (
    LocalSettings,
    LoraSettings,
    OptimizerSettings,
    make_local_settings,
)

__all__ = [
    "LocalSettings",
    "LocalTrainer",
    "LogpScorer",
    "LoraSettings",
    "OptimizerSettings",
    "ReferenceScorer",
    "ValueScorer",
    "make_local_settings",
]
