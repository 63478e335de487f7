"""One thread for torch, whatever the machine has."""

import torch

torch.set_num_threads(1)
