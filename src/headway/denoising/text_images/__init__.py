"""Strings as small pictures: what the small model is pretrained on, and what its rewards read."""

from headway.denoising.text_images.text_rendering import TextImageStyle, make_clean_style, render_text

__all__ = ["TextImageStyle", "make_clean_style", "render_text"]
