"""Strings as small pictures: what the small model is pretrained on, and what its rewards read."""

from headway.generative.text_images.rendering import Style, plain, render

__all__ = ["Style", "plain", "render"]
