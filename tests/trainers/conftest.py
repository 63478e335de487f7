"""One torch thread for all tests of trainers: the machine is shared, and sums have one order."""

import torch

torch.set_num_threads(1)
