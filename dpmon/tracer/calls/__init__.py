"""Calls of models, over one device or several."""
