"""`dpmon report`: a summary of a run, as text, as JSON, or as a page with plots.

`report_data` reads a run's directory into one `ReportData`. `sections` makes a document of it, which `plain_text` and
`html_page` draw; `report_json` makes JSON of the data itself. `tables` declares the tables that all of them show, and
the panels of the screen.
"""
