"""The host's memory of a rank."""

from __future__ import annotations

import threading
from pathlib import Path
from unittest import mock

import pytest
import torch

from zeromesh.comm.host import HostArena, HostLink, prefer_node
from zeromesh.errors import CommunicationError


def test_an_arena_is_registered_as_long_as_it_lives_and_its_parts_outlive_it():
    cuda = mock.Mock()
    cuda.cudaHostRegister.return_value = 0
    with mock.patch("zeromesh.comm.host._cudart", lambda: cuda), mock.patch("zeromesh.comm.host._node_of", lambda _: 0):
        arena = HostArena(48, torch.device("cuda"))
        first, second = arena.take(32, torch.float32), arena.take(16, torch.bfloat16)
        cuda.cudaHostRegister.assert_called_once_with(first.data_ptr(), 48, 0)
        cuda.cudaHostUnregister.assert_not_called()
        del arena
        cuda.cudaHostUnregister.assert_called_once_with(first.data_ptr())
        first.fill_(1)
        assert not second.any() and second.data_ptr() == first.data_ptr() + 32
        cuda.cudaHostRegister.return_value = 2
        with pytest.raises(CommunicationError, match=r"cannot register 48 bytes .*error 2.*ulimit -l"):
            HostArena(48, torch.device("cuda"))


def test_an_arena_in_chunks_is_registered_chunk_by_chunk():
    cuda = mock.Mock()
    cuda.cudaHostRegister.return_value = 0
    with mock.patch("zeromesh.comm.host._cudart", lambda: cuda), mock.patch("zeromesh.comm.host._node_of", lambda _: 0):
        arena = HostArena(80, torch.device("cuda"), chunk_bytes=32)
        begin = arena.memory.data_ptr()
        parts = [(begin, 32), (begin + 32, 32), (begin + 64, 16)]
        assert cuda.cudaHostRegister.call_args_list == [mock.call(*part, 0) for part in parts]
        del arena
        assert sorted(call.args[0] for call in cuda.cudaHostUnregister.call_args_list) == [at for at, _ in parts]


def policy_of(memory: torch.Tensor, task: str = "self") -> str:
    address = f"{memory.data_ptr():08x} "
    lines = Path(f"/proc/{task}/numa_maps").read_text().splitlines()
    (line,) = [each for each in lines if each.startswith(address)]
    return line.split()[1]


@pytest.mark.skipif(not Path("/proc/self/numa_maps").exists(), reason="a kernel without NUMA nodes")
def test_memory_prefers_a_node():
    arena = HostArena(1 << 20, torch.device("cpu"))
    prefer_node(0, arena.memory)
    assert policy_of(arena.memory).startswith("prefer")


@pytest.mark.skipif(not Path("/proc/self/numa_maps").exists(), reason="a kernel without NUMA nodes")
def test_the_thread_of_the_steps_prefers_the_device_s_node_and_the_process_does_not():
    found = {}
    link = HostLink("host", HostArena(1, torch.device("cpu")), torch.device("cuda"), ranks=1)

    def step() -> None:
        link.enter_thread(torch.get_num_threads())
        arena, own = HostArena(1 << 20, torch.device("cpu")), f"self/task/{threading.get_native_id()}"
        found.update(step=policy_of(arena.memory, own), process=policy_of(arena.memory))

    with mock.patch("zeromesh.comm.host._node_of", lambda _: 0):
        thread = threading.Thread(target=step)
        thread.start()
        thread.join()
    assert found["step"].startswith("prefer") and found["process"] == "default"
