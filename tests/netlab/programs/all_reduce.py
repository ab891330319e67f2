"""One rank of a gloo all-reduce over the whole world, under torchrun's environment. Prints its result.

all_reduce.py NUM_ELEMENTS
"""

import sys
from datetime import timedelta

import torch
import torch.distributed as dist

dist.init_process_group("gloo", timeout=timedelta(seconds=40))
tensor = torch.full((int(sys.argv[1]),), float(dist.get_rank() + 1))
dist.all_reduce(tensor)
print(tensor.min().item(), tensor.max().item())
dist.destroy_process_group()
