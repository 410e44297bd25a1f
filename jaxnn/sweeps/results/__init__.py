"""Results of a sweep: members, groups with intervals, comparisons, plots, and reading them from a record."""

from jaxnn.sweeps.results._comparison import Comparison as Comparison
from jaxnn.sweeps.results._comparison import compare as compare
from jaxnn.sweeps.results._comparison import mean_difference as mean_difference
from jaxnn.sweeps.results._comparison import seeds_needed as seeds_needed
from jaxnn.sweeps.results._members import LOST as LOST
from jaxnn.sweeps.results._members import Axis as Axis
from jaxnn.sweeps.results._members import Member as Member
from jaxnn.sweeps.results._members import count_by_status as count_by_status
from jaxnn.sweeps.results._members import show_point as show_point
from jaxnn.sweeps.results._stored import ENDED as ENDED
from jaxnn.sweeps.results._stored import MEMBERS_FILE as MEMBERS_FILE
from jaxnn.sweeps.results._stored import read_sweep as read_sweep
from jaxnn.sweeps.results._stored import swept_value as swept_value
from jaxnn.sweeps.results._summary import bootstrap_interval as bootstrap_interval
from jaxnn.sweeps.results._sweep import RunOpener as RunOpener
from jaxnn.sweeps.results._sweep import Sweep as Sweep
from jaxnn.sweeps.results._sweep import best_label as best_label
