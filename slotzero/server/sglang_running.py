"""The running requests of SGLang's /generate, by the ids that clients gave them."""

from collections.abc import Sequence

from slotzero.errors import RequestError
from slotzero.server.generation import Generation


class RunningRequests:
    def __init__(self) -> None:
        self._found: dict[str, tuple[Generation, range]] = {}

    def watcher(self, rids: Sequence[str], n: int) -> "RequestWatcher":
        """Return what makes a request known while it runs; it has n answers for each id."""
        return RequestWatcher(
            self._found, {rid: range(i * n, i * n + n) for i, rid in enumerate(rids)}
        )

    def abort(self, rid: str) -> None:
        """End a request, with the tokens that it has; one that does not run is left alone."""
        if rid in self._found:
            generation, indices = self._found[rid]
            generation.cancel(indices)


class RequestWatcher:
    def __init__(self, found: dict[str, tuple[Generation, range]], own: dict[str, range]) -> None:
        self._found, self._own = found, own
        self._has_begun = False

    def begin(self, generation: Generation) -> None:
        for rid in self._own:
            if rid in self._found:
                raise RequestError(f"rid: a request {rid} runs already", "rid")
        self._has_begun = True
        self._found |= {rid: (generation, indices) for rid, indices in self._own.items()}

    async def finish(self, generation: Generation) -> None:
        pass

    def end(self) -> None:
        if self._has_begun:
            for rid in self._own:
                del self._found[rid]
