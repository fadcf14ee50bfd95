"""The format of records: fields (schema, fields), bytes (wire), decoding (codec) and JSON (jsonl)."""
