"""Commands of Python in processes that are forked rather than started anew: `import torch` alone takes seconds.

`run_python("-m", "zeromesh.cli", "train", "run.toml")` is as `subprocess.run([sys.executable, ...])`, and so is each
Python that the command starts in its turn. The processes are real ones, with their own environment, signals, sessions
and exit codes; only `exec` is left out. Modules that the server has imported are there already.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import inspect
import os
import runpy
import signal
import subprocess
import sys
import threading
import traceback
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NoReturn

import torch

from tests.dist.pool import fork_context

TIMEOUT_S = 300.0
PR_SET_PDEATHSIG = 1
DIES_WITH_PARENT = ("setpriv", "--pdeathsig", "KILL")
OWN_PATHS = os.environ.get("PYTHONPATH", "").split(os.pathsep)
"""The server's: a command has more of them where it is to import others."""
_execute = subprocess.Popen._execute_child  # type: ignore[attr-defined]


def run_python(
    *words: str | Path, env: Mapping[str, str] | None = None, cwd: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """As `subprocess.run([sys.executable, *words], env=env, cwd=cwd, capture_output=True, text=True)`."""
    arguments = [str(word) for word in words]
    with TemporaryDirectory() as directory:
        printed = [Path(directory, name) for name in ("stdout", "stderr")]
        process = fork_context().Process(
            target=_serve, args=(arguments, dict(os.environ if env is None else env), cwd or Path.cwd(), printed)
        )
        process.start()
        process.join(TIMEOUT_S)
        hung = process.exitcode is None
        if hung:
            process.kill()
            process.join()
        out, err = (path.read_text() for path in printed)
    assert not hung, f"{arguments} did not end in {TIMEOUT_S} s:\n{out}\n{err}"
    return subprocess.CompletedProcess(arguments, process.exitcode or 0, out, err)


def _serve(words: Sequence[str], env: Mapping[str, str], cwd: Path, printed: Sequence[Path]) -> None:
    _die_with_parent()
    subprocess.Popen._execute_child = _fork_child  # type: ignore[attr-defined]
    streams = [os.open(os.devnull, os.O_RDONLY), *(os.open(path, os.O_WRONLY | os.O_CREAT) for path in printed)]
    _become(words, env, cwd, streams)


def _fork_child(self: subprocess.Popen[bytes], *given: Any) -> None:
    """In place of `Popen._execute_child`: Pythons are forked from this process, all others started."""
    call = inspect.signature(_execute).bind(self, *given).arguments
    words = [os.fspath(word) for word in call["args"]] if not isinstance(call["args"], str) else []
    bound = tuple(words[: len(DIES_WITH_PARENT)]) == DIES_WITH_PARENT
    words = words[len(DIES_WITH_PARENT) * bound :]
    if words[:1] != [sys.executable]:
        _execute(self, *given)
        return
    sys.stdout.flush()
    sys.stderr.flush()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there are threads
        self.pid = os.fork()
    self._child_created = True  # type: ignore[attr-defined]
    pipes = [call[name] for name in ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")]
    if self.pid:
        self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]
        return
    try:
        if bound:
            _die_with_parent()
        if call["start_new_session"]:
            os.setsid()
        _become(words[1:], call["env"] or os.environ, call["cwd"] or Path.cwd(), [pipes[0], pipes[3], pipes[5]])
    finally:
        os._exit(255)


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _become(words: Sequence[str], env: Mapping[str, str], cwd: str | Path, streams: Sequence[int]) -> NoReturn:
    """Runs the command of a Python in this process, to the end of the process."""
    gc.freeze()  # else the child's first collection walks, and so copies, all that it has inherited
    weakref.finalize._registry.clear()  # type: ignore[attr-defined]  # the parent's, such as of temporary directories
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.chdir(cwd)
    for number, stream in enumerate(streams):
        if stream != -1:
            os.dup2(stream, number)
    sys.stdout.reconfigure(line_buffering=True)
    env = dict(env)
    os.environ.clear()
    os.environ.update(env)
    torch.set_num_threads(int(env.get("OMP_NUM_THREADS", "1")))
    for path in reversed(env.get("PYTHONPATH", "").split(os.pathsep)):
        if path not in OWN_PATHS:
            _prefer(Path(path))
    code = _code_of(lambda: _run(words))
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _prefer(folder: Path) -> None:
    """The folder's modules, in place of those that this process has of the same names."""
    sys.path.insert(0, str(folder))
    own = {path.stem for path in folder.iterdir()}
    for name in [name for name in sys.modules if name.partition(".")[0] in own]:
        del sys.modules[name]
    if "sitecustomize" in own:
        __import__("sitecustomize")


def _run(words: Sequence[str]) -> None:
    kind, *rest = words[1:] if words[0] == "-u" else words
    sys.argv = [kind, *rest]
    if kind == "-m":
        sys.argv = rest
        for name in (rest[0], f"{rest[0]}.__main__"):  # of this process; runpy warns of it
            if not hasattr(sys.modules.get(name), "__path__"):
                sys.modules.pop(name, None)
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    elif kind == "-c":
        sys.argv = ["-c", *rest[1:]]
        exec(compile(rest[0], "<string>", "exec"), {"__name__": "__main__"})
    else:
        sys.path.insert(0, str(Path(kind).resolve().parent))
        runpy.run_path(kind, run_name="__main__")


def _code_of(program: Callable[[], None]) -> int:
    """The exit code, as the interpreter makes it."""
    try:
        program()
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return (end.code or 0) & 0xFF
        print(end.code, file=sys.stderr)
        return 1
    except BaseException:
        traceback.print_exc()
        return 1
    return 0
