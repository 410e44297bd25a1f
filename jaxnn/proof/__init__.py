"""What a recorded run did, computed again: ``replay`` of any step."""

from jaxnn.proof._replay import Replay, replay

__all__ = ["Replay", "replay"]
