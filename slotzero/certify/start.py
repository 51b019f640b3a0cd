"""Build an engine, with the live sanitizer if its config asks for it.

Nothing else of this package is imported for an engine without the sanitizer.
"""

from slotzero.config import EngineConfig
from slotzero.engine.engine import Engine
from slotzero.system.progress import Told, not_told


def start_engine(config: EngineConfig, told: Told = not_told) -> Engine:
    if config.sanitize == "off":
        return Engine(config, told=told)
    from slotzero.certify.live import attach

    return Engine(config, told=told, attach_checks=lambda engine: attach(engine, config))
