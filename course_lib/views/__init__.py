"""Pictures, one file per topic. Only notebooks and tests import them."""
