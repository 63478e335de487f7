"""The scheduler: eight stages joined by typed channels, and the controller that bounds how far rollout runs ahead."""
