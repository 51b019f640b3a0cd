"""Build an engine, with the live sanitizer if its config asks for it.

Nothing else of this package is imported for an engine without the sanitizer.
"""

from slotzero.config import EngineConfig
from slotzero.engine.engine import Engine
from slotzero.system.progress import OnProgress, ignore_progress


def start_engine(config: EngineConfig, on_progress: OnProgress = ignore_progress) -> Engine:
    if config.sanitize == "off":
        return Engine(config, on_progress=on_progress)
    from slotzero.certify.live import attach

    return Engine(
        config, on_progress=on_progress, attach_checks=lambda engine: attach(engine, config)
    )
