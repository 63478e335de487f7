"""The flow: eight stages joined by typed channels, and the controller that says how far rollout may run ahead."""
