"""Text data sets for classification and language modelling."""
