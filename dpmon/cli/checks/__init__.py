"""The checks of `dpmon doctor`: one module per subject, with functions that yield Checks."""
