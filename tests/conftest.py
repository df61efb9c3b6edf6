"""One thread: small steps run faster, and CPU attention allocates once, not once a thread."""

import torch

torch.set_num_threads(1)
