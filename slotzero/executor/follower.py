"""The process of a rank other than rank 0: `python -m slotzero.executor.follower RANK FD`.

It is started by rank0.py, or by node_agent.py on another machine. It loads its shard of the model,
captures the same sizes as rank 0, and then runs the messages of rank 0 until its connection ends;
or it runs one task and sends the result. With DP attention it sends the tokens that it sampled.
Rank 0 handles the signals to stop, so this process ignores them.
"""

import os
import queue
import signal
import sys
import threading
import traceback
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

from slotzero.errors import SlotzeroError
from slotzero.system.child import end_with_parent
from slotzero.system.stacks import write_stacks_when_asked

if TYPE_CHECKING:
    from slotzero.executor.worker import Worker
    from slotzero.graph.transfer import PendingTensors


def main(argv: Sequence[str]) -> int:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    rank = int(argv[0])
    write_stacks_when_asked(f"rank {rank}")
    end_with_parent()
    try:
        with Connection(int(argv[1])) as connection:
            follow(rank, connection)
        return 0
    except (EOFError, ConnectionError, TimeoutError):
        return 0  # rank 0 is gone
    except SlotzeroError as error:
        print(f"rank {rank}: {error}", file=sys.stderr)
        return error.exit_code
    except RuntimeError:  # a collective in which another rank did not take part
        print(f"rank {rank}: {traceback.format_exc()}", file=sys.stderr)
    return 1


def follow(rank: int, connection: "Connection[Any, Any]") -> None:
    from slotzero.checkpoint.source import checkpoint_of
    from slotzero.executor.build import build_worker
    from slotzero.executor.limits import choose_backend
    from slotzero.executor.rank_group import RankGroup

    rendezvous, config, task = connection.recv()
    device, _ = choose_backend(config)
    connection.send(rank)
    how = config.enable_expert_parallel, config.enable_dp_attention, config.deterministic
    rank_group = RankGroup(rendezvous.join(rank, device, *how))
    if task is not None:
        connection.send(task(config, rank_group))
        return
    checkpoint = checkpoint_of(config)
    worker = build_worker(config, checkpoint, lambda done, total: None, rank_group)
    if not config.lazy_recording:
        worker.record(lambda record: None)
    run_messages(worker, connection)


def run_messages(worker: "Worker", connection: "Connection[Any, Any]") -> None:
    """Run the messages of rank 0 until the connection ends or a message is None."""
    outbox: queue.SimpleQueue[PendingTensors | None] = queue.SimpleQueue()
    # In another thread, so that waiting for the samples of a step does not delay the next launch.
    sender = threading.Thread(target=_send, args=(outbox, connection), daemon=True)
    sender.start()
    while (message := connection.recv()) is not None:
        results = worker.run_message(message)
        if results is not None:
            outbox.put(results)
    outbox.put(None)
    sender.join()


def _send(
    outbox: "queue.SimpleQueue[PendingTensors | None]", connection: "Connection[Any, Any]"
) -> None:
    try:
        while (results := outbox.get()) is not None:
            connection.send([tensor.numpy() for tensor in results.wait()])
    except ConnectionError:
        return  # rank 0 is gone
    except BaseException as error:  # end the process, because rank 0 would wait for a silent rank
        print(f"the sampled tokens could not be sent: {error}", file=sys.stderr, flush=True)
        os._exit(1)


if __name__ == "__main__":
    exit_code = main(sys.argv[1:])
    sys.stderr.flush()
    os._exit(exit_code)  # skip the shutdown of the process group, which may be broken
