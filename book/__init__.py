"""Tools that make readers' copies of the chapters."""
