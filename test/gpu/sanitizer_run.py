"""Two small launches for compute-sanitizer, one without and one with a cluster: `python sanitizer_run.py racecheck`."""

import sys

import torch

from headfit.kernels import sparse_mqa_cuda as kernel
from headfit.testing.cases import Case, PackedFp8Format, make_case

if sys.argv[1] == "racecheck":  # it does not follow one lane's arrival for its warp
    kernel._DEBUG_DEFINES["RACECHECK"] = 1
for size in (1, 2):
    kernel._plan = lambda num_tokens, num_heads, *_, size=size: kernel._layout(
        8, size, num_tokens, num_heads, kernel._cluster_slots(0)
    )
    case = Case(num_heads=8, num_keys=(128, 100), lengths="ragged", absent=0.2)
    arguments = make_case(case, size, kv_format=PackedFp8Format(), device="cuda", dtype=torch.bfloat16)
    kernel.sparse_mqa_cuda(regions=(arguments.pop("window"), arguments.pop("compressed")), **arguments)
    torch.cuda.synchronize()
print("ran 2 launches")
