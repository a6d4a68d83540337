"""One thread: the tensors of these tests are tiny, so that threads cost more time than they save."""

import torch

torch.set_num_threads(1)
