"""`dpmon report`: a summary of a run, as text, as JSON, or as a page with plots.

`collect_report_data` reads a run's directory into one `ReportData`. `sections` makes a document of it, which
`plain_text` and `html_page` draw; `report_json` makes JSON of the data itself.
"""

from dpmon.report.plain_text import report_text
from dpmon.report.report_data import collect_report_data

__all__ = ["collect_report_data", "report_text"]
