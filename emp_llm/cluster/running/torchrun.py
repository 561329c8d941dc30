"""torchrun for jobs: `python -m emp_llm.cluster.running.torchrun` takes torchrun's own words.

It differs in how it ends. Its exit code is that of the rank that failed first, and 143 on SIGTERM. The log ends with the cause
in one sentence, without torchrun's traceback. On one node it needs no port.
"""

import logging
import os
import signal
import socket
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

from emp_llm.lifelines.lifeline import Lifeline, Seat
from emp_llm.lifelines.peer import AGAIN, LOST_CODE, RankLost

_CONSEQUENCES = (LOST_CODE, 143, -signal.SIGTERM)  # exit codes of ranks that end because another has ended
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def start_ranks(words: list[str] | None = None) -> None:
    """Start the ranks of this node, wait for them, and exit."""
    from torch.distributed import run as torchrun
    from torch.distributed.elastic.multiprocessing import api

    logging.disable()
    options = torchrun.parse_args(sys.argv[1:] if words is None else words)  # type: ignore[no-untyped-call]
    nodes, _ = torchrun.parse_min_max_nnodes(options.nnodes)
    store, line = None, None
    if nodes == 1:
        store = _local_store()
        options.rdzv_backend, options.rdzv_endpoint = "static", f"127.0.0.1:{store.port}"
    else:
        host, _, port = options.rdzv_endpoint.rpartition(":")
        host = host.strip("[]")
        _name_interface(host, int(port))
        line = Lifeline(Seat("node", options.node_rank, nodes, host, int(port), serves=options.node_rank == 0))
    api._terminate_process_handler = partial(_end, line)
    code, message = _ended(partial(torchrun.run, options), options.rdzv_endpoint)
    if message:
        print(f"error: {message}", file=sys.stderr)
    if line is not None:
        line.leave(code, message)
    sys.exit(code)


def _ended(run: Callable[[], None], meeting: str) -> tuple[int, str]:
    """Run the ranks; returns the exit code, and the cause if it is to be printed."""
    from torch.distributed import DistError
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    try:
        run()
    except SignalException as stopped:
        return 128 + stopped.sigval, ""
    except KeyboardInterrupt:
        return 130, ""
    except RankLost as loss:
        return loss.code, str(loss)
    except ChildFailedError as failed:
        return _explain(failed.failures)
    except DistError as error:
        cause = str(error).splitlines()[0].rstrip(".")
        return LOST_CODE, f"the nodes did not meet at {meeting} ({cause}). {AGAIN}"
    return 0, ""


def _local_store() -> Any:
    """A store on a free port, which torchrun shares: between finding a port and using it, no other process can take it."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, multi_tenant=True)


def _name_interface(host: str, port: int) -> None:
    """Tell gloo the network interface that leads to the first node. It would take that of the host's name, often loopback."""
    import psutil  # type: ignore[import-untyped]

    try:
        kind, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(kind, socket.SOCK_DGRAM) as probe:
            probe.connect(address)  # sends nothing
            own = probe.getsockname()[0]
    except OSError:
        return  # torchrun reports it
    for name, addresses in psutil.net_if_addrs().items():
        if own in [each.address for each in addresses]:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", name)


def _end(line: Lifeline | None, number: int, _: object) -> None:
    """End on the first signal. A scheduler may send another to all processes of a job, while the ranks still clean up."""
    from torch.distributed.elastic.multiprocessing import SignalException

    for each in _SIGNALS:
        signal.signal(each, signal.SIG_IGN)
    if line is not None:
        line.end()
    raise SignalException(f"signal {number}", sigval=signal.Signals(number))


def _explain(failures: dict[int, Any]) -> tuple[int, str]:
    """The exit code and the message of the rank that failed first."""
    ordered = sorted(failures.items(), key=lambda each: (each[1].exitcode in _CONSEQUENCES, each[1].timestamp))
    rank, first = ordered[0]
    code: int = 128 - first.exitcode if first.exitcode < 0 else first.exitcode
    if code == 143:
        return code, ""  # the rank has said so
    if "timestamp" in first.error_file_data:  # the rank has left its message
        text = first.error_file_data["message"]
    elif first.exitcode < 0:
        name = first.signal_name()
        reason = "; the machine may have too little memory" if name == "SIGKILL" else ""
        text = f"rank {rank} (process {first.pid}) was ended by {name}{reason}. {AGAIN}"
    else:
        text = f"rank {rank} ended with exit code {code}; its message stands above."
    return code, text


if __name__ == "__main__":
    start_ranks()
