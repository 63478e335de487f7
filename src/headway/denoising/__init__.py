"""Flow and diffusion image models on the same line as language models: models, engine, trainer, rewards."""
