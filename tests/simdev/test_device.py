"""The device by itself: order of streams, waits of the host, and memory as torch's allocator for CUDA has it."""

from __future__ import annotations

import sys

import pytest
import torch

from tests.simdev.ranks import alone
from zeromesh import simdev
from zeromesh.errors import InputError

MIB = 1 << 20


def stream() -> torch.Stream:
    return torch.Stream("simdev")


@alone()
def test_tensors_of_two_devices_are_refused():
    ours, theirs = torch.ones(2, device="simdev"), torch.ones(2)
    one = torch.ones((), device="simdev")
    for mix in (
        lambda: ours + theirs,
        lambda: theirs.mul_(one),
        lambda: torch.stack([one, torch.ones(())]),
        lambda: torch._foreach_mul_([theirs, ours], one),
    ):
        with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
            mix()
    torch._foreach_copy_([ours], [theirs])
    torch._foreach_mul_([ours, theirs], 2.0)
    assert (ours * torch.tensor(2.0))[torch.tensor([1])].item() == 4 and theirs.tolist() == [2, 2]


@alone()
def test_random_numbers_are_the_devices_own():
    device = torch.device("simdev")
    torch.get_device_module("simdev").manual_seed(7)
    before = torch.get_rng_state()
    first = torch.rand(4, device=device).tolist()
    assert torch.equal(before, torch.get_rng_state())
    assert first == torch.rand(4, generator=torch.Generator(device).manual_seed(7), device=device).tolist()
    state = torch.get_device_module("simdev").get_rng_state()
    later = torch.rand(4, device=device).tolist()
    torch.get_device_module("simdev").set_rng_state(state)
    assert later == torch.rand(4, device=device).tolist() != first


@alone()
def test_what_no_event_orders_is_a_race():
    with simdev.Checker() as checker:
        values, side = torch.zeros(8, device="simdev"), stream()
        with side:
            values.add_(1)
    read, race = (race for race in checker.races if race.earlier_operation == "aten::zero_")
    assert race.operation == "aten::add" and race.stream != race.earlier_stream == 0
    assert race.writes and race.earlier_writes and not read.writes
    assert __file__ in race.where and __file__ in race.earlier_where
    assert "nothing orders one after the other" in str(race)
    with simdev.Checker() as checker:
        values, side = torch.zeros(8, device="simdev"), stream()
        side.wait_stream(torch.accelerator.current_stream())
        with side:
            values.add_(1)
        event = side.record_event()
        torch.accelerator.current_stream().wait_event(event)
        values.add_(1)
    assert checker.races == [] and checker.checked > 3


@alone()
def test_the_host_waits_for_copies_before_it_uses_its_memory():
    """Elsewhere in the same memory, before anything is copied and after a wait, it may."""
    values, host = torch.ones(8, device="simdev"), torch.zeros(16, pin_memory=True)
    with simdev.Checker() as checker:
        host.fill_(2)
        host[:8].copy_(values, non_blocking=True)
        host[8:].add_(1)
        torch.accelerator.synchronize()
        host[:8].add_(1)
        values.copy_(host[:8], non_blocking=True)
        host[:8].sum()
    assert checker.races == []
    with simdev.Checker() as checker:
        host[:8].copy_(values, non_blocking=True)
        host[4:6].sum().item()
        values.copy_(host[8:], non_blocking=True)
        host.mul_(2)
    assert [(race.operation, race.writes, race.earlier_writes) for race in checker.races] == [
        ("aten::sum", False, True),
        ("aten::mul_", True, True),
        ("aten::mul_", True, False),
    ]
    assert "reads on the host what copy to the host" in str(checker.races[0])


@alone()
def test_a_block_freed_under_another_stream_is_found():
    def use(*, then: str) -> simdev.Checker:
        with simdev.Checker() as checker:
            values, side, main = torch.zeros(8, device="simdev"), stream(), torch.accelerator.current_stream()
            side.wait_stream(main)
            with side:
                values + 1
            if then == "record":
                values.record_stream(side)
            elif then == "wait":
                main.wait_stream(side)
            del values
        return checker

    (early,) = use(then="nothing").early_frees
    assert early.size_bytes == 32 and early.earlier_operation == "aten::add" and __file__ in early.where
    assert "may still use them" in str(early)
    assert use(then="record").early_frees == use(then="wait").early_frees == []


@alone()
def test_reads_of_the_host_have_their_line():
    with simdev.Checker() as checker:
        values = torch.ones(4, device="simdev")
        line = sys._getframe().f_lineno + 1
        values.sum().item()
        values.cpu()
        torch.nonzero(values)
        torch.empty(4).copy_(values, non_blocking=True)  # to memory that is not pinned: it waits all the same
    assert [read.operation for read in checker.host_reads] == [
        "aten::_local_scalar_dense",
        "copy to the host",
        "aten::nonzero",
        "copy to the host",
    ]
    assert [read.where for read in checker.host_reads] == [f"{__file__}:{line + index}" for index in range(4)]
    with simdev.Checker() as checker:
        host = torch.empty(4, pin_memory=True)
        host.copy_(values, non_blocking=True)
        values.copy_(host, non_blocking=True)
        values.copy_(torch.ones(4))
    assert checker.host_reads == [] and len(checker.host_waits) == 1


@alone()
def test_memory_is_cut_as_torch_cuts_it():
    module = torch.get_device_module("simdev")
    torch.accelerator.synchronize()  # blocks that another stream has used come back when it is done
    module.empty_cache()
    before = simdev.memory_stats()
    assert before.reserved_bytes == before.allocated_bytes == 0
    small = torch.empty(100, dtype=torch.uint8, device="simdev")
    stats = simdev.memory_stats()
    assert (stats.allocated_bytes, stats.rounded_bytes, stats.reserved_bytes) == (100, 512, 2 * MIB)
    middle = torch.empty(3 * MIB, dtype=torch.uint8, device="simdev")
    assert simdev.memory_stats().reserved_bytes == 22 * MIB
    large = torch.empty(11 * MIB + 1, dtype=torch.uint8, device="simdev")  # the rest of the 20 MiB holds it
    assert simdev.memory_stats().reserved_bytes == 22 * MIB
    larger = torch.empty(11 * MIB + 1, dtype=torch.uint8, device="simdev")
    assert simdev.memory_stats().reserved_bytes == (22 + 12) * MIB
    del middle, large
    whole = torch.empty(20 * MIB, dtype=torch.uint8, device="simdev")  # of two neighbours, free again
    assert simdev.memory_stats().reserved_bytes == 34 * MIB
    with stream():  # another stream has blocks of its own
        other = torch.empty(1, device="simdev")
    assert simdev.memory_stats().reserved_bytes == 36 * MIB
    assert torch.accelerator.memory_stats()["requested_bytes.all.current"] == simdev.memory_stats().allocated_bytes
    del small, larger, whole, other
    simdev.reset_peak_memory()
    assert simdev.memory_stats().peak_reserved_bytes == 36 * MIB and simdev.memory_stats().allocated_bytes == 0
    module.empty_cache()
    assert simdev.memory_stats().reserved_bytes == 0


@alone()
def test_without_room_the_cache_goes_back_first():
    def reserved(mib):
        made = torch.empty(mib * MIB, dtype=torch.uint8, device="simdev")
        return made, simdev.memory_stats().reserved_bytes // MIB, simdev.memory_stats().retries

    torch.accelerator.synchronize()
    torch.get_device_module("simdev").empty_cache()
    with simdev.memory_limit(100 * MIB):
        assert reserved(30)[1:] == (30, 0)
        held, *found = reserved(60)
        assert found == [90, 0]
        assert reserved(40)[1:] == (100, 1)  # the 30 were free
        del held
        assert reserved(20)[1:] == (100, 1)  # in memory that is there
        assert reserved(110)[1:] == (110, 2)  # nothing else is left, and it is too much
    before = simdev.memory_stats().retries
    assert reserved(200)[1:] == (310, before)


@alone()
def test_a_block_that_another_stream_has_is_not_handed_out_before_it_may():
    values, side = torch.empty(64, device="simdev"), stream()
    address = values.data_ptr()
    values.record_stream(side)
    del values
    kept = torch.empty(64, device="simdev")
    assert kept.data_ptr() != address
    torch.accelerator.current_stream().wait_stream(side)
    assert torch.empty(64, device="simdev").data_ptr() == address


@alone()
def test_fresh_memory_is_not_a_number():
    assert torch.empty(5, device="simdev").isnan().all().item()


@alone()
def test_a_recorder_hears_kernels_and_orders_as_they_are_issued():
    heard: list[simdev.recorder.Entry] = []
    x, side = torch.ones(2, 3, device="simdev"), stream()
    with simdev.Recorder(heard.append):
        side.wait_stream(torch.accelerator.current_stream())
        with side:
            x @ x.T
    record, wait, kernel = heard
    assert (record.kind, wait.kind, wait.event) == ("record", "wait", record.event)
    assert kernel.name.startswith("aten::mm") and kernel.stream == side.stream_id == wait.stream
    assert [tuple(tensor.shape) for tensor in kernel.arguments[:2]] == [(2, 3), (3, 2)]


@alone()
def test_wrong_use():
    with pytest.raises(InputError, match=r"is real, and cannot become virtual: use another process"):
        simdev.start(virtual=True)
    with pytest.raises(InputError, match=r"rank must be 0 to 3 in a world of 4; got 4"):
        simdev.counting_group(4, 4)
    with simdev.Checker(), pytest.raises(InputError, match="one Checker at a time"), simdev.Checker():
        pass
    with (
        simdev.Recorder(lambda entry: None),
        pytest.raises(InputError, match="one Recorder at a time"),
        simdev.Recorder(lambda entry: None),
    ):
        pass
