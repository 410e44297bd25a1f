"""Search spaces: points, the members they stand for, and the groups of members that one program trains."""

from jaxnn.sweeps.search._groups import Group as Group
from jaxnn.sweeps.search._groups import Loader as Loader
from jaxnn.sweeps.search._groups import Planned as Planned
from jaxnn.sweeps.search._groups import plan_groups as plan_groups
from jaxnn.sweeps.search._groups import plan_members as plan_members
from jaxnn.sweeps.search._groups import reason as reason
from jaxnn.sweeps.search._points import Halving as Halving
from jaxnn.sweeps.search._points import Points as Points
from jaxnn.sweeps.search._points import choice as choice
from jaxnn.sweeps.search._points import grid as grid
from jaxnn.sweeps.search._points import halving as halving
from jaxnn.sweeps.search._points import integers as integers
from jaxnn.sweeps.search._points import log_uniform as log_uniform
from jaxnn.sweeps.search._points import override as override
from jaxnn.sweeps.search._points import random as random
from jaxnn.sweeps.search._points import scale_of as scale_of
from jaxnn.sweeps.search._points import uniform as uniform
from jaxnn.sweeps.search._points import zipped as zipped
from jaxnn.sweeps.search._tracing import field_names as field_names
from jaxnn.sweeps.search._tracing import field_value as field_value
from jaxnn.sweeps.search._tracing import traced_values as traced_values
from jaxnn.sweeps.search._tracing import watched as watched
from jaxnn.sweeps.search._tracing import with_fields as with_fields
from jaxnn.sweeps.search._tracing import with_values as with_values
