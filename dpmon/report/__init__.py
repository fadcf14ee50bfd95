"""`dpmon report`: a summary of a run, as text, as JSON, or as a page with plots.

`collect` reads a run's directory into one `Story`. `sections` makes a document of it, which `text` and `page` draw;
`asjson` makes JSON of the story itself.
"""

from dpmon.report.collect import collect
from dpmon.report.text import report_text

__all__ = ["collect", "report_text"]
