"""Memory that the machine's files say is free."""

from __future__ import annotations

from pathlib import Path

from zeromesh.files import available_memory_bytes


def test_memory_of_a_control_group_that_holds_cached_files_is_free(tmp_path: Path) -> None:
    files = {
        "proc/meminfo": "MemTotal: 900 kB\nMemAvailable: 500 kB\n",
        "proc/self/cgroup": "0::/job/rank\n",
        "sys/fs/cgroup/job/rank/memory.max": "max\n",
        "sys/fs/cgroup/job/memory.max": "400000\n",
        "sys/fs/cgroup/job/memory.current": "390000\n",
        "sys/fs/cgroup/job/memory.stat": "anon 90000\nactive_file 50000\ninactive_file 250000\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert available_memory_bytes(tmp_path) == 400_000 - (390_000 - 250_000)
    (tmp_path / "sys/fs/cgroup/job/memory.max").write_text("max\n")
    assert available_memory_bytes(tmp_path) == 500 * 1024
    assert available_memory_bytes(tmp_path / "proc") is None
