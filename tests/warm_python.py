"""Python processes that start at once: forks of a server that has imported everything.

A command of emp-llm spends most of a short job on imports. `WarmPython` makes an executable that stands for Python: each of its
processes hands its words, folder, environment and streams to the server, which forks one that runs the module; the process
itself only forwards signals, and ends as the fork does. If it is killed, so is the fork. What is no `-m MODULE` is run by the
real Python.

A note in the file that the variable WARM_PYTHON_HOLD names holds a process in the middle of its work: the one with the noted
file among its words stops (SIGSTOP) when it has written that file, until a signal comes.
"""

import ctypes
import gc
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from launch import IMPORTS

_MORE = [
    "emp_llm.cluster.jobs",
    "emp_llm.evaluate",
    "emp_llm.run",
    "lm_eval.api.metrics",
    "lm_eval.evaluator",
    "lm_eval.tasks",
    "pydantic.main",
    "torch.distributed",
    "transformers.convert_slow_tokenizer",
    "transformers.models.auto.tokenization_auto",
    "typer.main",
]
HOLD = "WARM_PYTHON_HOLD"
# The process that stands for Python: short, because its start is all that it costs.
_CLIENT = """\
import json, os, signal, socket, sys
python, where, own = sys.argv[1:4]
words = sys.argv[4:]
while words[:1] == ["-u"]:
    words = words[1:]
if words[:1] != ["-m"]:
    os.execv(python, [python, *sys.argv[4:]])
server = socket.socket(socket.AF_UNIX)
server.connect(where)
said = {"words": words[1:], "folder": os.getcwd(), "environment": dict(os.environ), "executable": own}
text = json.dumps(said).encode()
socket.send_fds(server, [len(text).to_bytes(8, "big")], [0, 1, 2])
server.sendall(text)
def forward(number, frame):
    try:
        server.send(bytes([number]))
    except OSError:  # the fork has just ended
        pass
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
    signal.signal(number, forward)
answer = server.recv(8)
if len(answer) < 8:
    os._exit(70)
code = int.from_bytes(answer, "big", signed=True)
if code < 0:
    signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)
os._exit(code)
"""


class WarmPython:
    """A server of warm processes.

    Args:
        folder: an empty one, with a short path.

    Attributes:
        executable: stands for Python, also as `sys.executable`.
    """

    def __init__(self, folder: Path) -> None:
        self.executable = folder / "python"
        (folder / "client.py").write_text(_CLIENT)
        words = f"'{sys.executable}' -ISE '{folder}/client.py' '{sys.executable}' '{folder}/socket' '{self.executable}'"
        self.executable.write_text(f'#!/bin/sh\nexec {words} "$@"\n')
        self.executable.chmod(0o755)
        line = [sys.executable, __file__, str(folder / "socket")]
        self._server = subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)
        assert self._server.stdout is not None
        assert self._server.stdout.readline() == b"ready\n"

    def stop(self) -> None:
        """End the server and all its processes."""
        os.killpg(self._server.pid, signal.SIGKILL)
        self._server.wait()
        for pipe in (self._server.stdin, self._server.stdout):
            assert pipe is not None
            pipe.close()


def _serve(where: str) -> None:
    for name in (*IMPORTS, *_MORE):
        importlib.import_module(name)
    conversion = importlib.import_module("transformers.conversion_mapping")
    conversion.get_checkpoint_conversion_mapping("llama")  # compiles a thousand patterns, once in a process
    gc.collect()
    gc.freeze()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the handlers
    with socket.socket(socket.AF_UNIX) as door:
        door.bind(where)
        door.listen(64)
        print("ready", flush=True)
        while select.select([door, 0], [], [])[0] == [door]:  # the end of standard input ends the server
            connection, _ = door.accept()
            if os.fork() == 0:
                door.close()
                _handle(connection)
            connection.close()


def _handle(connection: socket.socket) -> NoReturn:
    """Run one process, and forward signals to it."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    size, files, _, _ = socket.recv_fds(connection, 8, 3)
    text = b""
    while len(text) < int.from_bytes(size, "big"):
        text += connection.recv(1 << 16)
    said: dict[str, Any] = json.loads(text[: int.from_bytes(size, "big")])
    process = os.fork()
    if process == 0:
        connection.close()
        _run(said, files)
    ended = os.pidfd_open(process)
    while True:
        ready = select.select([ended, connection], [], [])[0]
        if ended in ready:
            break
        numbers = connection.recv(16)
        for number in (*numbers, signal.SIGCONT) if numbers else (signal.SIGKILL,):
            os.kill(process, number)
        if not numbers:
            break
    code = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    with suppress(OSError):  # the process that stands for this one may have been killed
        connection.sendall(code.to_bytes(8, "big", signed=True))
    os._exit(0)


def _run(said: dict[str, Any], files: list[int]) -> NoReturn:
    """The process itself: a module as `python -m` runs it."""
    import runpy

    os.setsid()
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: it ends with its handler
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    sys.stdin, sys.stdout, sys.stderr = open(0), open(1, "w"), open(2, "w", buffering=1)  # noqa: SIM115
    os.chdir(said["folder"])
    os.environ.clear()
    os.environ.update(said["environment"])
    sys.executable = said["executable"]
    module, *rest = said["words"]
    sys.argv = [module, *rest]
    sys.path[0] = said["folder"]
    sys.modules.pop(module, None)
    if HOLD in os.environ:
        _hold(Path(os.environ[HOLD]), rest)
    code = 0
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
        code = 1
    import atexit

    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _hold(note: Path, words: list[str]) -> None:
    """If a note names a file among the words, take the note and stop this process as soon as there is the file."""

    def watch() -> None:
        while not path.exists():
            time.sleep(0.001)
        with suppress(FileNotFoundError):  # another process was held
            note.unlink()
            os.kill(os.getpid(), signal.SIGSTOP)

    with suppress(FileNotFoundError):
        path = Path(note.read_text())
        if str(path) in words:
            threading.Thread(target=watch, daemon=True).start()


if __name__ == "__main__":
    _serve(sys.argv[1])
