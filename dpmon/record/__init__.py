"""What a record is: its bytes (wire), how they are read (codec), and its JSON (jsonl)."""
