"""The articles' claims as studies: measured on the devices that there are, shown beside the articles' figures."""

from jaxnn.bench.measuring import bench as bench
from jaxnn.bench.measuring import merge as merge
from jaxnn.bench.results import read_results as read_results
from jaxnn.bench.studies import STUDIES as STUDIES
