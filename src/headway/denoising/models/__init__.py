"""Denoising models behind one protocol: a small multimodal transformer, and Stable Diffusion 3 of `diffusers`.

The package needs torch; only back ends import it.
"""
