"""The directory of a run: what it holds, what a resumed run changes, and what others see of a run at work."""
