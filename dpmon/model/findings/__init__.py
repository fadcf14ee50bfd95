"""Findings: problems of a run that its records show, each with evidence and advice."""
