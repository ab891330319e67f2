"""Rates of making, reading and summing quantised messages, compared with a copy of the same tensor.

    python -m benchmarks.kernels --out benchmarks/results/kernels.json
    python -m benchmarks.kernels --device cpu --mib 1 16

On a GPU it times the Triton kernels, by events on the stream. On a CPU it times torch's operations by the clock, on
pieces that stay in cache, as collectives use them. Bytes are the least that an operation must read and write: a copy of
n elements moves 2 * n * width. Goal on a GPU: at least 85 % of the copy's rate.

    quantise      tensor -> message
    dequantise    message -> tensor
    reduce        messages of all other ranks, own tensor -> sum
    requantise    the same -> the sum's message, and what that holds
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks.harness import parser
from zeromesh.comm.messages import Messages, parts
from zeromesh.measure.setting import read_setting
from zeromesh.wires.blocks import QuantFormat
from zeromesh.wires.blocks.quantiser import Quantiser
from zeromesh.wires.target import Target

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
RANKS = 4
"""Number of ranks whose messages are summed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A tensor of values and the messages of all ranks, on one device. `target` receives read or summed values, and
    `message` a sum."""

    form: QuantFormat
    values: Tensor
    target: Tensor
    messages: Tensor
    message: Tensor

    @classmethod
    def make(cls, form: QuantFormat, numel: int, dtype: torch.dtype, device: str) -> Case:
        values = torch.randn(numel, device=device).to(dtype)
        message = torch.zeros(form.message_bytes(numel), dtype=torch.uint8, device=device)
        return cls(
            form=form,
            values=values,
            target=torch.empty_like(values),
            messages=message.repeat(RANKS, 1),
            message=message,
        )

    @property
    def mean(self) -> Target:
        return Target(out=self.target, scale=1 / RANKS, accumulate=False)

    def moved_bytes(self) -> dict[str, int]:
        """Bytes moved by each operation."""
        tensor, message = self.values.nbytes, self.messages[0].nbytes
        return {
            "copy": 2 * tensor,
            "quantise": tensor + message,
            "dequantise": message + tensor,
            "reduce": (RANKS - 1) * message + 2 * tensor,
            "requantise": RANKS * message + 2 * tensor,
        }

    def on_gpu(self) -> dict[str, Callable[[], object]]:
        """Returns the function that runs each operation."""
        from zeromesh.wires.blocks.kernels import TritonQuantiser

        quantiser, whole = TritonQuantiser(self.form, generator(self.form)), slice(0, self.values.numel())
        return {
            "copy": lambda: self.target.copy_(self.values),
            "quantise": lambda: quantiser.quantise(self.values, self.messages[0]),
            "dequantise": lambda: quantiser.dequantise(self.messages[0], self.target),
            "reduce": lambda: quantiser.reduce(self.messages, self.values, 0, self.mean, whole),
            "requantise": lambda: quantiser.requantise(self.messages, self.values, 0, self.mean, whole, self.message),
        }

    def on_cpu(self) -> dict[str, Callable[[], object]]:
        """Returns functions that do the same piece by piece."""
        memory = torch.zeros(self.form.memory_bytes(Messages.longest), dtype=torch.uint8)
        quantiser = Quantiser(self.form, Messages.longest, memory, generator(self.form))

        def by_piece(call: Callable[[slice, slice], object]) -> Callable[[], object]:
            """Calls `call` for one piece after another, with the piece's elements and its message's bytes."""

            def run() -> None:
                for part in parts(self.values.numel(), Messages.longest):
                    call(part, slice(self.form.message_bytes(part.start), self.form.message_bytes(part.stop)))

            return run

        values, target, messages, mean = self.values, self.target, self.messages, self.mean
        return {
            "copy": lambda: target.copy_(values),
            "quantise": by_piece(lambda part, room: quantiser.quantise(values[part], messages[0][room])),
            "dequantise": by_piece(lambda part, room: quantiser.dequantise(messages[0][room], target[part])),
            "reduce": by_piece(lambda part, room: quantiser.reduce(messages[:, room], values[part], 0, mean, part)),
            "requantise": by_piece(
                lambda part, room: quantiser.requantise(
                    messages[:, room], values[part], 0, mean, part, self.message[room]
                )
            ),
        }


def generator(form: QuantFormat) -> torch.Generator | None:
    """Makes a generator for stochastic rounding, which gradients without error feedback use."""
    return torch.Generator().manual_seed(0) if form.stochastic else None


def seconds(call: Callable[[], object], device: str, repeats: int) -> float:
    """Median seconds of one call over `repeats` calls."""
    for _ in range(2):  # the first call compiles
        call()
    if device == "cpu":
        times = []
        for _ in range(repeats):
            begin = time.perf_counter()
            call()
            times.append(time.perf_counter() - begin)
        return statistics.median(times)
    # Some milliseconds in which the host gets ahead, so that a launch does not count as part of its kernel.
    torch.cuda._sleep(10_000_000)  # type: ignore[no-untyped-call]  # torch leaves it so
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]  # type: ignore[no-untyped-call]  # torch leaves it so
    for start, end in events:
        start.record()
        call()
        end.record()
    torch.cuda.synchronize()
    return float(statistics.median(start.elapsed_time(end) for start, end in events)) / 1e3


def rows(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    for mib in args.mib:
        for name, dtype in DTYPES.items():
            for bits, stochastic in itertools.product((8, 4), (False, True)):
                form = QuantFormat(bits=bits, stochastic=stochastic)
                case = Case.make(form, (mib << 20) // dtype.itemsize, dtype, args.device)
                calls = case.on_cpu() if args.device == "cpu" else case.on_gpu()
                calls["quantise"]()
                case.messages.copy_(case.messages[0].clone().expand_as(case.messages))
                moved = case.moved_bytes()
                rates = {each: moved[each] / seconds(call, args.device, args.repeats) for each, call in calls.items()}
                yield {
                    "tensor_bytes": case.values.nbytes,
                    "dtype": name,
                    "bits": bits,
                    "stochastic": stochastic,
                    "bytes_per_s": {each: round(rate) for each, rate in rates.items()},
                    "share_of_copy": {each: round(rates[each] / rates["copy"], 3) for each in calls if each != "copy"},
                }


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    options.add_argument("--mib", type=int, nargs="+", default=[64, 256, 1024], help="sizes of the tensor")
    options.add_argument("--repeats", type=int, default=20)
    args = options.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        options.error(
            "torch finds no CUDA device; --device cpu --mib 1 16 measures torch's operations on the processor"
        )
    if args.repeats < 1 or min(args.mib) < 1:
        options.error(f"--repeats and --mib must be at least 1; got {args.repeats} and {min(args.mib)}")
    torch.set_num_threads(1)
    here = {
        **read_setting(),
        "device": torch.cuda.get_device_name() if args.device != "cpu" else "cpu",
        "threads": 1,
        "ranks": RANKS,
    }
    results = []
    for row in rows(args):
        results.append(row)
        print(json.dumps(row), flush=True)
        if args.out:
            args.out.write_text(json.dumps({"setting": here, "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
