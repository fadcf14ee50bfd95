"""The format of records: fields (schema, fields), rows (history_rows), names (names) and JSON (jsonl)."""
