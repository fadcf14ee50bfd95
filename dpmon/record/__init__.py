"""Records: their bytes (wire), a reader of these (codec), and their JSON (jsonl)."""
