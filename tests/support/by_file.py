"""How pytest-xdist shares out the tests: by file, single tests of some, and a crash costs one test.

Tests of a file share fixtures, so one process runs them. Marks of groups would say the same, but
from pytest 9.2 on xdist 3.8 does not see them, and shares out single tests.
"""

from typing import Any

from xdist.scheduler import LoadScopeScheduling

SINGLY = "tests/kernels/test_triton.py", "tests/kernels/triton/", "tests/gpu/"
"""Tests that share little: any process may run any of them."""


class ByFile(LoadScopeScheduling):
    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.split("::")[0]
        return nodeid if file.startswith(SINGLY) else file

    def remove_node(self, node: Any) -> str | None:
        """Give the tests of a crashed worker to others, except the one that it was running.

        xdist would run that one again, on one worker after another until none is left.
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
        """A worker that replaces a crashed one gets no tests before it has collected them."""
        if node in self.registered_collections:
            super()._reschedule(node)
