"""What the screen, the report and the command line share: numbers, clean text, widths, ASCII, palettes."""
