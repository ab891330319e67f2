"""`zeromesh env`: a machine's description, for bug reports."""

from __future__ import annotations

import os

PREFIXES = ("NCCL_", "RCCL_", "GLOO_", "TORCH_", "CUDA_", "HIP_", "OMP_", "ZEROMESH_")


def env() -> None:
    """Print versions, devices, and the environment variables of a run."""
    import torch

    from zeromesh.comm.nccl import SLOW_CTAS, shared_splits
    from zeromesh.launch.device import CPU, backend_for, device_name, set_variables, visible_devices
    from zeromesh.measure.setting import read_setting

    kind = torch.accelerator.current_accelerator(check_available=True) or CPU
    names = [device_name(torch.device(kind.type, index)) for index in range(visible_devices())]
    lines = read_setting() | {
        "cuda": torch.version.cuda or torch.version.hip or "none",
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if kind.type == "cuda" else "none",  # type: ignore[no-untyped-call]  # torch leaves it so
        "devices": ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names)) or "none: the CPU",
        "backend": backend_for(kind),
    }
    if kind.type == "cuda":
        alone = f"between machines max_ctas={SLOW_CTAS}, split_share=1 under stages 0 to 2"
        between = "split_share=1" if shared_splits() else alone
        lines["communicators"] = f"{between}; inside, with register=True, cta_policy=ZERO"
    for name, value in lines.items():
        print(f"{name}: {value}")
    before = dict(os.environ)
    set_variables(rank=0)
    for name in sorted(name for name in os.environ if name.startswith(PREFIXES)):
        print(f"{name}={os.environ[name]}{'' if name in before else '  (set by zeromesh)'}")
