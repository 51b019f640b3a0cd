"""An engine's client for HTTP tests whose vectors are those of an engine in this process."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from fake_engine import FakeClient, FakeStream

from slotzero.config import EngineConfig
from slotzero.engine.engine import Engine
from slotzero.errors import RequestError, RequestRefusedError
from slotzero.sampling.params import SamplingParams
from slotzero.server.messages import TokenDelta


class VectorClient(FakeClient):
    def __init__(self, **settings: Any) -> None:
        super().__init__()
        fixed = {"model": "tiny:llama", "backend": "eager", "show_progress": False}
        config = {**fixed, **settings}
        self.settings = config
        self.engine = Engine(EngineConfig(**config))
        self.info = {
            **self.info,
            "limits": {"max_model_len": self.engine.limits.max_model_len},
            "pooling": asdict(self.engine.pooling),
        }

    def submit(self, request_id: str, prompt: list[int], params: Mapping[str, Any]) -> FakeStream:
        self.submitted.append((request_id, prompt, dict(params)))
        try:
            handle = self.engine.add(request_id, prompt, SamplingParams(**params))
        except RequestError as error:
            refusal = RequestRefusedError("RequestError", str(error), error.param, error.label)
            refusing = FakeClient(refusal=refusal)
            return FakeStream(refusing, request_id, [TokenDelta(request_id, [], [], 0)])
        while not handle.finished:
            self.engine.step()
        assert handle.vector is not None
        vector = handle.vector.astype("<f4").tobytes()
        num_found, reason = handle.request.num_found, handle.finish_reason
        delta = TokenDelta(request_id, [], [], num_found, reason, vector=vector)
        return FakeStream(self, request_id, [delta])
