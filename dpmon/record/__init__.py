"""The format of records: fields (schema, fields), rows (history_rows), names (wire) and JSON (jsonl)."""
