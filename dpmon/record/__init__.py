"""The format of records: fields (schema, record_specs), rows (history_rows), names (shared_names) and JSON (jsonl)."""
