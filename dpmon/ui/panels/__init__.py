"""The panels: each makes the title and the rows of one place of the screen."""
