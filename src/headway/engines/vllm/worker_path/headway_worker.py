"""Loads a version into a vLLM worker as a whole (`--worker-extension-cls headway_worker.WeightReloadExtension`).

On a CPU vLLM packs the output layer when it first loads it, and packs it again only when a checkpoint has weights of
its own for it. Where it is tied to the embedding a checkpoint has none: after `reload_weights` the worker would go on
with the output layer of the first version. Imports nothing of ours, and of vLLM only what the worker brings along.
"""

from __future__ import annotations

from typing import Any


class WeightReloadExtension:
    """Mixed into every worker; its methods are called by name."""

    def headway_load(self: Any, weights_path: str) -> None:
        """`reload_weights` from a directory, as a whole."""
        self.reload_weights(weights_path=weights_path)
        self.headway_pack()

    def headway_pack(self: Any) -> None:
        """Pack again whatever reads the weights of another layer."""
        for layer in self.model_runner.get_model().modules():
            if hasattr(layer, "cpu_linear") and type(layer).__name__ == "ParallelLMHead":
                layer.quant_method.process_weights_after_loading(layer)
