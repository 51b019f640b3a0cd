"""Scheduler for pytest-xdist that distributes tests by file, and loses one test to a crash.

Tests of a file share fixtures, so one process runs them all; files whose tests share little are
distributed test by test. xdist_group marks would do the same, but with pytest 9.2 and newer,
xdist 3.8 does not see them and distributes single tests.
"""

import contextlib
from typing import Any

from xdist.scheduler import LoadScopeScheduling

SINGLY = "tests/kernels/test_triton.py", "tests/kernels/triton/", "tests/gpu/"
"""Tests that share few fixtures, so that any process may run any of them."""


class ByFile(LoadScopeScheduling):
    """The scheduler: one scope per file, or per test for the files in `SINGLY`."""

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.split("::")[0]
        return nodeid if file.startswith(SINGLY) else file

    def remove_node(self, node: Any) -> str | None:
        """Give the tests of a crashed worker to others, except the test that it was running.

        xdist would run that test again, and crash one worker after another until none is left.
        """
        pending = {
            scope: [nodeid for nodeid, is_done in unit.items() if not is_done]
            for scope, unit in self.assigned_work.pop(node).items()
        }
        crashed = next((nodeid for unit in pending.values() for nodeid in unit), None)
        for scope, unit in pending.items():
            if left := [nodeid for nodeid in unit if nodeid != crashed]:
                self.workqueue[scope] = dict.fromkeys(left, False)
        for other in self.assigned_work:
            self._reschedule(other)
        return crashed

    def _reschedule(self, node: Any) -> None:
        """Skip a worker that replaces a crashed one until it has collected the tests.

        A worker may have crashed without the scheduler knowing yet: then no work can be sent to
        it, and `remove_node`, which is called next, gives that work to others.
        """
        if node in self.registered_collections:
            with contextlib.suppress(OSError):
                super()._reschedule(node)
