"""A trainer in one process: any `transformers` decoder, full or by LoRA, with reference and critic.

    store = WeightStore(...)
    trainer = LocalTrainer(lambda: AutoModelForCausalLM.from_pretrained(path), local_settings_of(resolved), store)

`trainer` is the asynchronous face, `learner` everything behind it that a thread does. One step reads top down:
`tokens` (samples → arrays) → `packing` (arrays → trees without padding) → `model` (trees → log-probabilities)
→ `update` (losses → gradients → weights).
"""

from headway.trainers.local.scorers import LogpScorer, ReferenceScorer, ValueScorer
from headway.trainers.local.settings import LocalSettings, LoraSettings, OptimizerSettings, local_settings_of
from headway.trainers.local.trainer import LocalTrainer

__all__ = [
    "LocalSettings",
    "LocalTrainer",
    "LogpScorer",
    "LoraSettings",
    "OptimizerSettings",
    "ReferenceScorer",
    "ValueScorer",
    "local_settings_of",
]
