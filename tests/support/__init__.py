"""Helpers of the tests. tests/conftest.py puts the folder above this package on sys.path."""
