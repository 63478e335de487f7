"""One thread: the machine is shared by the processes of the suite, and sums are the same on every machine."""

from __future__ import annotations

import torch

torch.set_num_threads(1)
