"""A rank that stops taking part in collectives while a file exists, see hanging.py."""

import os
import signal
import sys

from slotzero.system.stacks import SIGNAL

if __name__ == "__main__":
    signal.pthread_sigmask(signal.SIG_BLOCK, {SIGNAL})  # before torch starts threads
    from hanging import hang_before

    from slotzero.distributed.ranks import Ranks
    from slotzero.executor import follower

    hang_before(Ranks, "sum")
    os._exit(follower.main(sys.argv[1:]))
