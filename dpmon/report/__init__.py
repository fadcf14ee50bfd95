"""`dpmon report`: a summary of a run, as text, as JSON, or as a page with plots.

`collect` reads a run's directory into one `Story`. `sections` makes a document of it, which `text` and `page` draw;
`asjson` makes JSON of the story itself.
"""

from dpmon.report.plain_text import report_text
from dpmon.report.report_data import collect_report_data

__all__ = ["collect_report_data", "report_text"]
