"""Loads whole versions into a vLLM worker (`--worker-extension-cls headway_worker.WeightReloadExtension`).

On a CPU vLLM packs the output layer when it first loads it, and packs it again only when a checkpoint has weights of
its own for it. Where it is tied to the embedding a checkpoint has none: after `reload_weights` the worker would keep
the output layer of the first version. Imports nothing of Headway, and of vLLM only what the worker brings along.
"""

from typing import Any


class WeightReloadExtension:
    """Is mixed into every worker; its methods are called by name."""

    def headway_load(self: Any, weights_path: str) -> None:
        """Load all weights from a directory."""
        self.reload_weights(weights_path=weights_path)
        self.headway_pack()

    def headway_pack(self: Any) -> None:
        """Pack output layers again, which may read the weights of another layer."""
        for layer in self.model_runner.get_model().modules():
            if hasattr(layer, "cpu_linear") and type(layer).__name__ == "ParallelLMHead":
                layer.quant_method.process_weights_after_loading(layer)

    def headway_label(self: Any, label: str = "") -> str:
        """Return the label of the weights, or set it: a vLLM before 0.28 has none of its own."""
        if label:
            self._headway_label = label
        return getattr(self, "_headway_label", "none")
