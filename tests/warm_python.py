"""Processes of Python that begin with the heavy packages imported: most of a short script's time.

One process imports what others have written, nothing of this package, for all workers of a run of
the tests. It is forked for each :class:`WarmPython`, and that one for each script: a process of its
own then, as if Python had been started with its arguments, folder and environment. It imports the
package, writes to its own streams and ends with its own status.
"""

from __future__ import annotations

import atexit
import fcntl
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import ModuleType
from typing import IO, Any

PACKAGES = (
    "torch",
    "torch._dynamo",
    "transformer_lens",
    "numpy",
    "pandas",
    "xarray",
    "plotly.graph_objects",
    "plotly.io",
    "scipy.stats",
    "sklearn.linear_model",
    "pydantic",
    "jinja2",
    "joblib",
    "safetensors.torch",
    "tqdm",
    "typer",
)


class Started:
    """A process that has been forked; of :class:`subprocess.Popen` what a kernel is managed by."""

    stdin = stdout = stderr = None

    def __init__(self, pid: int, statuses: IO[bytes]) -> None:
        self.pid, self._statuses = pid, statuses
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Its status, or None while it runs."""
        if self.returncode is None and select.select([self._statuses], [], [], 0)[0]:
            self.returncode = int(self._statuses.readline())
        return self.returncode

    def wait(self) -> int:
        """Its status, once it has ended."""
        if self.returncode is None:
            self.returncode = int(self._statuses.readline())
        return self.returncode

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class WarmPython:
    """Runs scripts one after another; to be closed.

    Args:
        first: Python that is run once, before all of them.
    """

    def __init__(self, first: str = "") -> None:
        self._server: subprocess.Popen[bytes] | None = None
        run = os.environ.get("PYTEST_XDIST_TESTRUNUID", str(os.getpid()))
        self._path = Path(tempfile.gettempdir()) / f"warm-{run}"
        self._connection = socket.socket(socket.AF_UNIX)
        with _one_at_a_time():
            try:
                self._connection.connect(str(self._path))
            except OSError:  # the first of this run, or the server has ended
                self._start()
                self._connection.connect(str(self._path))
        # Read byte by byte, so that none waits where select does not look.
        self._said: Any = self._connection.makefile("rb", buffering=0)
        self._ask(first)

    def _start(self) -> None:
        self._path.unlink(missing_ok=True)
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(self._path))
            listener.listen()
            self._server = subprocess.Popen([sys.executable, __file__], stdin=listener.fileno())

    def _ask(self, what: Any) -> None:
        self._connection.sendall(f"{json.dumps(what)}\n".encode())

    def run(
        self,
        *arguments: str,
        cwd: Path | str | None = None,
        env: Mapping[str, str] | None = None,
        timeout: int = 600,
    ) -> subprocess.CompletedProcess[str]:
        """What ``subprocess.run([python, *arguments])`` returns, its output captured.

        Args:
            arguments: ``-c code``, ``-m module …`` or ``script.py …``.
            cwd: Its folder.
            env: Its environment; that of the tests by default.
            timeout: Seconds after which it is ended, with status -14.
        """
        with tempfile.TemporaryDirectory() as folder:
            streams = [Path(folder) / name for name in ("stdout", "stderr")]
            status = self.start(arguments, streams, cwd=cwd, env=env, timeout=timeout).wait()
            said = [stream.read_text() for stream in streams]
        return subprocess.CompletedProcess(["python", *arguments], status, *said)

    def start(
        self,
        arguments: Sequence[str],
        streams: Sequence[Path | str],
        *,
        cwd: Path | str | None = None,
        env: Mapping[str, str] | None = None,
        timeout: int = 600,
        own_group: bool = False,
    ) -> Started:
        """Start a script, to be waited for before the next; its output goes into two files.

        ``own_group`` makes it the first of a group of processes, which signals are sent to.
        """
        request = {
            "arguments": arguments,
            "cwd": str(cwd or Path.cwd()),
            "env": dict(os.environ if env is None else env),
            "streams": [*map(str, streams)],
            "timeout": timeout,
            "own_group": own_group,
        }
        self._ask(request)
        return Started(int(self._said.readline()), self._said)

    def close(self) -> None:
        """End the process that is forked."""
        self._connection.shutdown(socket.SHUT_WR)
        self._said.read()  # until it has ended
        self._said.close()
        self._connection.close()
        if self._server is not None:
            with _one_at_a_time():  # another worker may be about to connect
                self._server.terminate()
                self._server.wait()
                self._path.unlink()


@contextmanager
def _one_at_a_time() -> Iterator[None]:
    folder = os.open(tempfile.gettempdir(), os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)


def _serve() -> dict[str, Any]:
    """Fork for each connection and then for each request; in that new process, the request."""
    del sys.path[0]  # where this file is
    listener, parent = socket.socket(fileno=os.dup(0)), os.getppid()
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    for package in PACKAGES:
        importlib.import_module(package)
    gc.freeze()  # what is shared is not looked through, and so not copied, in each process
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # none waits for the ends of connections
    listener.settimeout(1)
    while os.getppid() == parent:
        with suppress(TimeoutError):
            connection, _ = listener.accept()
            if os.fork() == 0:
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                listener.close()
                return _serve_one(connection)
            connection.close()
    Path(listener.getsockname()).unlink(missing_ok=True)
    os._exit(0)


def _serve_one(connection: socket.socket) -> dict[str, Any]:
    connection.setblocking(True)
    with connection, connection.makefile("rw") as stream:
        exec(json.loads(stream.readline()), {})
        gc.freeze()
        while line := stream.readline():
            request = json.loads(line)
            child = os.fork()
            if child == 0:
                return request
            if request["own_group"]:
                os.setpgid(child, child)
            print(child, file=stream, flush=True)
            _, status = os.waitpid(child, 0)
            print(os.waitstatus_to_exitcode(status), file=stream, flush=True)
    os._exit(0)


def _become(request: dict[str, Any]) -> None:
    """Make this process one that was started as the request says, and run its script."""
    signal.alarm(request["timeout"])
    for number, path in enumerate(request["streams"], start=1):
        with open(path, "w") as stream:
            os.dup2(stream.fileno(), number)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    first, *rest = request["arguments"]
    own = {"-c": "", "-m": request["cwd"]}.get(first, str(Path(first).parent))
    sys.path[:0] = [own, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    if first == "-c":
        code, *words = rest
        sys.argv = ["-c", *words]
        main = sys.modules["__main__"] = ModuleType("__main__")
        exec(compile(code, "<string>", "exec"), vars(main))
    elif first == "-m":
        sys.argv = rest
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv = [first, *rest]
        runpy.run_path(first, run_name="__main__")


_status: int | None = None  # to end with; None where Python ends as usual, as after an interrupt


def _leave() -> None:
    """End at once: Python takes a third of a second to take all modules apart."""
    if _status is not None:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(_status)


if __name__ == "__main__":
    atexit.register(_leave)  # before all others, so that it runs after them
    request = _serve()
    try:
        _become(request)
        _status = 0
    except SystemExit as end:
        _status = end.code if isinstance(end.code, int) else int(end.code is not None)
        raise
    except Exception:
        _status = 1
        raise
