"""Requests in the order in which they are served: by priority, then by arrival.

It does not know what a request holds, or whether it runs. The rule: the order is total and never
changes, since no request changes its priority or its arrival.
"""

from bisect import bisect_left, insort
from collections.abc import Iterator

from slotzero.request import Request


class RequestQueue:
    def __init__(self) -> None:
        self._requests: list[Request] = []
        self._ids: set[str] = set()

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._ids

    @property
    def first(self) -> Request:
        return self._requests[0]

    @property
    def last(self) -> Request:
        return self._requests[-1]

    def add(self, request: Request) -> None:
        insort(self._requests, request, key=_place)
        self._ids.add(request.id)

    def remove(self, request: Request) -> None:
        del self._requests[bisect_left(self._requests, _place(request), key=_place)]
        self._ids.remove(request.id)


def _place(request: Request) -> tuple[int, int]:
    return request.params.priority, request.arrival
