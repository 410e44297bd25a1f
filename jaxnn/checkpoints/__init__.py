"""Saved states: complete or absent, checked before they are read, and readable with plain Orbax.

All that jaxnn asks of Orbax is in here.
"""

from jaxnn.checkpoints.folder import FOLDER as FOLDER
from jaxnn.checkpoints.folder import Log as Log
from jaxnn.checkpoints.folder import files_below as files_below
from jaxnn.checkpoints.run import Checkpoints as Checkpoints
from jaxnn.checkpoints.run import Damage as Damage
from jaxnn.checkpoints.run import Restored as Restored
from jaxnn.checkpoints.run import open_checkpoints as open_checkpoints
from jaxnn.checkpoints.single import load as load
from jaxnn.checkpoints.single import save as save
from jaxnn.checkpoints.team import Team as Team
from jaxnn.checkpoints.trees import refusal as refusal
