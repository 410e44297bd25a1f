"""What a model is trained for: a model and a loss become a `jaxnn.types.Task`."""

from jaxnn.tasks._classification import binary_classification as binary_classification
from jaxnn.tasks._classification import classification as classification
from jaxnn.tasks._classification import next_token as next_token
from jaxnn.tasks._contract import averaged_over as averaged_over
from jaxnn.tasks._contract import checked as checked
from jaxnn.tasks._contract import checked_batch as checked_batch
from jaxnn.tasks._contract import derived_metrics as derived_metrics
from jaxnn.tasks._supervised import Model as Model
from jaxnn.tasks._supervised import as_model as as_model
from jaxnn.tasks._supervised import regression as regression
from jaxnn.tasks._supervised import supervised as supervised
