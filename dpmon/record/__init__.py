"""What a record is: its fields (schema), its bytes (wire), and how one is read (codec)."""
