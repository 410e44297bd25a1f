"""The front end for one run: ``fit``, ``iterate`` and ``train``, what they print, and the ``Run`` they return."""

from jaxnn.run._display import Display as Display
from jaxnn.run._display import open_display as open_display
from jaxnn.run._fit import fit as fit
from jaxnn.run._fit import iterate as iterate
from jaxnn.run._record import file_name_of as file_name_of
from jaxnn.run._report import NAME_WIDTH as NAME_WIDTH
from jaxnn.run._report import device_rows as device_rows
from jaxnn.run._report import format_metrics as format_metrics
from jaxnn.run._report import format_rate as format_rate
from jaxnn.run._report import format_split as format_split
from jaxnn.run._resume import KEPT_OPTIONS as KEPT_OPTIONS
from jaxnn.run._resume import check_same_config as check_same_config
from jaxnn.run._resume import recorded_setup as recorded_setup
from jaxnn.run._run import Run as Run
from jaxnn.run._signals import RESUMABLE as RESUMABLE
from jaxnn.run._signals import Farewell as Farewell
from jaxnn.run._signals import Interruption as Interruption
from jaxnn.run._signals import drop_output as drop_output
from jaxnn.run._signals import interruptible as interruptible
from jaxnn.run._signals import leave as leave
from jaxnn.run._train import train as train
from jaxnn.run._watchdog import watching as watching
