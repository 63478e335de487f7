"""The directory of a run: what it holds, what a resumed run changes, what others see of a run at work, its upload."""
