"""torchrun for jobs: `python -m emp_llm.cluster.running.torchrun` takes torchrun's own words.

It differs in how it ends. Its exit code is that of the rank that failed first, and 143 on SIGTERM. The log ends with the cause
in one sentence, without torchrun's traceback. On one node it needs no port.
"""

import logging
import os
import signal
import sys
from typing import Any

from emp_llm.common.errors import LOST_CODE
from emp_llm.common.lifeline import JOIN_SECONDS

_JOIN_LIMIT = "600"
_CONSEQUENCES = (LOST_CODE, 143, -signal.SIGTERM)  # exit codes of ranks that end because another has ended
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def start_ranks(words: list[str] | None = None) -> None:
    """Start the ranks of this node, wait for them, and exit."""
    from torch.distributed import run as torchrun
    from torch.distributed.elastic.multiprocessing import SignalException, api
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    logging.disable()
    os.environ.setdefault(JOIN_SECONDS, _JOIN_LIMIT)
    api._terminate_process_handler = _end  # type: ignore[assignment]
    options = torchrun.parse_args(sys.argv[1:] if words is None else words)  # type: ignore[no-untyped-call]
    nodes, _ = torchrun.parse_min_max_nnodes(options.nnodes)
    store = None if nodes > 1 else _local_store()
    if store is not None:
        options.rdzv_backend, options.rdzv_endpoint = "static", f"127.0.0.1:{store.port}"
    try:
        torchrun.run(options)  # type: ignore[no-untyped-call]
    except SignalException as stopped:
        sys.exit(128 + stopped.sigval)
    except KeyboardInterrupt:
        sys.exit(130)
    except ChildFailedError as failed:
        sys.exit(_explain(failed.failures))
    except RuntimeError as error:  # torch's own errors of stores and sockets
        if nodes == 1:
            raise
        where = f"node {options.node_rank} of {nodes}: the nodes did not meet at {options.rdzv_endpoint}"
        print(
            f"error: {where} ({str(error).splitlines()[0]}). The same command goes on from where it stopped.", file=sys.stderr
        )
        sys.exit(LOST_CODE)


def _local_store() -> Any:
    """A store on a free port, which torchrun shares: between finding a port and using it, no other process can take it."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, multi_tenant=True)


def _end(number: int, _: object) -> None:
    """End on the first signal. A scheduler may send another to all processes of a job, while the ranks still clean up."""
    from torch.distributed.elastic.multiprocessing import SignalException

    for each in _SIGNALS:
        signal.signal(each, signal.SIG_IGN)
    raise SignalException(f"signal {number}", sigval=signal.Signals(number))


def _explain(failures: dict[int, Any]) -> int:
    """Print the cause of a failure, and return the exit code of the rank that failed first."""
    ordered = sorted(failures.items(), key=lambda each: (each[1].exitcode in _CONSEQUENCES, each[1].timestamp))
    rank, first = ordered[0]
    code: int = 128 - first.exitcode if first.exitcode < 0 else first.exitcode
    if code == 143:
        return code  # the rank has said so
    message = first.error_file_data.get("message")
    if isinstance(message, str):
        text = message
    elif first.exitcode < 0:
        name = first.signal_name()
        reason = "; the machine may have too little memory" if name == "SIGKILL" else ""
        text = f"rank {rank} (process {first.pid}) was ended by {name}{reason}. The same command goes on from where it stopped."
    else:
        text = f"rank {rank} ended with exit code {code}; its message stands above."
    print(f"error: {text}", file=sys.stderr)
    return code


if __name__ == "__main__":
    start_ranks()
