"""Image models trained by reinforcement: denoising models, an engine that samples from them, and a trainer."""
